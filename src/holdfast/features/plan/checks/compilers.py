"""The check of `holdfast doctor` on compilers: what a GPU computes fast is built on this machine before it is run.

A Triton kernel of the head and a compiled block are built by a process of their own, `python -m
holdfast.features.plan.checks.compilers cuda`. Both need a C compiler and Python's headers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.config.sections.launch import LaunchConfig
from holdfast.features.plan.checks.findings import Finding, ok, since, warn
from holdfast.files import python_module
from holdfast.text.escaping import error_words

_FIX = (
    "Install gcc, g++ and Python's headers (Debian: apt-get install gcc g++ python3-dev); runs go on without, slower."
)
_DOCTOR_COMPILERS_SECONDS = 300.0
"""For a Triton kernel and a compiled block to be built, where `holdfast doctor` tries them."""


def look_at_compilers(launch: LaunchConfig) -> Iterator[Finding]:
    """Build a kernel and a block where a GPU is used; elsewhere a run needs neither."""
    import torch

    if torch.cuda.is_available() and launch.device != "cpu":
        yield from built_on("cuda")


def built_on(device: str) -> Iterator[Finding]:
    """Build a compiled block for a device, and for "cuda" a Triton kernel before it."""
    start = time.perf_counter()
    command = [*python_module("holdfast.features.plan.checks.compilers"), device]
    seconds = _DOCTOR_COMPILERS_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        reasons: dict[str, str] = json.loads(done.stdout.splitlines()[-1] if done.stdout.strip() else "")
    except subprocess.TimeoutExpired:
        yield warn("compilers", f"they built nothing within {seconds:g} s", _FIX)
        return
    except ValueError:
        yield warn("compilers", f"the process that builds ended with exit code {done.returncode}: {_last(done)}", _FIX)
        return
    failed = [f"{name} cannot be built ({reason})" for name, reason in reasons.items() if reason]
    if failed:
        yield warn("compilers", "; ".join([*failed, *_lacking()]), _FIX)
    else:
        yield ok("compilers", f"{' and '.join(reasons)} built and run in {since(start)}")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing said"


def _lacking() -> list[str]:
    """Return what compilers need and is not here."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    here = {"gcc": shutil.which("gcc"), "g++": shutil.which("g++"), str(headers): headers.exists()}
    return [f"{name} is not here" for name, there in here.items() if not there]


def reasons_of(device: str) -> dict[str, str]:
    """Return why each form cannot be built and run on a device, by name; "" for what can."""
    forms: dict[str, Callable[[Any], None]] = {"a Triton kernel": _run_kernel} if device == "cuda" else {}
    return {name: _reason(run, device) for name, run in {**forms, "a compiled block": _run_block}.items()}


def _reason(run: Callable[[Any], None], device: str) -> str:
    import torch

    try:
        run(torch.device(device))
    except Exception as error:  # noqa: BLE001 - compilers raise errors of many kinds
        return error_words(error)
    return ""


def _run_kernel(device: Any) -> None:
    """Sweep logits by the head's kernel, and compare with torch's operations.

    Raises:
        ValueError: They differ.
    """
    import torch

    from holdfast.models.chunks import kernel_form  # noqa: F401 - registers the operation

    products = torch.linspace(-4, 4, 8 * 128, device=device).view(8, 128)
    targets = torch.arange(8, device=device)
    best = torch.ops.holdfast.read_logits(products, None, targets, None, 1.0, False)[0]  # noqa: FBT003
    if not torch.equal(best, products.max(-1).values):
        message = "it computes other numbers than torch"
        raise ValueError(message)


def _run_block(device: Any) -> None:
    """Run a block forward and backward as compiled blocks of a model run, and compare with the block itself.

    Raises:
        RuntimeError: It was not compiled, for a reason that the message has.
        ValueError: The numbers differ.
    """
    import torch
    from torch import nn

    from holdfast.parallel.compiler import BlockCompiler

    class Block(nn.Module):  # dynamo leaves torch's own modules alone
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(self.inner(states)) * states

    torch.manual_seed(0)
    block, compiler = Block().to(device), BlockCompiler()
    inputs = torch.randn(8, 64, device=device)
    expected = block(inputs)
    compiler.compile(block)
    found = block(inputs)
    found.sum().backward()
    if compiler.reasons:
        raise RuntimeError(compiler.reasons[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    print(json.dumps(reasons_of(sys.argv[1])), flush=True)
