"""The checks of `holdfast doctor` on a machine: versions, devices, a rendezvous of the ranks, the disk.

The ranks are processes that meet and do nothing else, started as a run's are:
`python -m holdfast.features.plan.checks.machine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast.checkpoint.place.layout import fresh
from holdfast.checkpoint.place.storage import LocalStorage, Storage, open_storage
from holdfast.config.quiet import leave_out_broken, unfit_torchvision
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.config.versions import installed, pip_command, unmet_requirements, versions
from holdfast.errors import HoldfastError, UserError
from holdfast.features.plan.checks.compilers import look_at_compilers
from holdfast.features.plan.checks.findings import RANKS, Check, Finding, fail, ok, since, unknown, warn
from holdfast.features.plan.checks.trial import end_launcher
from holdfast.files import python_module, size_words
from holdfast.launch.environment import cuda_devices, resolve_ranks, under_torchrun
from holdfast.launch.local import launch_local
from holdfast.training.directory import checkpoint_place, run_directory

TASK, OUTCOME = "task.json", "outcome.json"
_NUMBERS = 2**18
"""float32 numbers that are added over the ranks: 1 MiB."""
_TRIED_BYTES = 2**23
_SLOW = 20 * 2**20
"""Bytes per second below which a place of checkpoints is called slow."""
_BUSY = 0.1
"""Share of a GPU's memory that is in use before the run, from which on it is told."""
_LEFT_OUT = "Install a build for this torch, or none; a low-bit optim.kind needs torchao, nothing needs torchvision."
_DOCTOR_RANKS_SECONDS = 120.0
"""For ranks to start and meet, where `holdfast doctor` tries them."""


def checks_of_machine(launch: LaunchConfig, *, compiles: bool = True) -> list[Check]:
    """Return the checks that need no run."""
    return [
        Check("versions", look_at_versions),
        Check("devices", lambda: look_at_devices(launch)),
        Check("compilers", lambda: look_at_compilers(launch) if compiles else iter(())),
        Check(RANKS, lambda: look_at_ranks(launch)),
    ]


def look_at_versions() -> Iterator[Finding]:
    """Compare what is installed with what Holdfast asks for, and with pairs that are known not to work."""
    decisive = ", ".join(f"{name} {number}" for name, number in versions().items() if name != "platform")
    wrong = unmet_requirements()
    if wrong is None:
        text = f"holdfast is not installed as a package, so what it asks for is not compared; {decisive}"
        yield unknown("versions", text, "Install it: pip install -e . in its directory.")
        yield from _faults()
        return
    if wrong:
        yield fail("versions", "; ".join(wrong.values()), f"Install them: {pip_command(wrong)}")
    faults = list(_faults())
    yield from faults
    if not wrong and not faults:
        yield ok("versions", decisive)


def _faults() -> Iterator[Finding]:
    yield from bad_pairs(installed)
    yield from (warn("versions", reason, _LEFT_OUT) for reason in leave_out_broken())


def bad_pairs(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Yield a failure for each pair of packages that are known not to work together, by their versions."""
    if reason := unfit_torchvision(installed):
        yield warn(
            "versions",
            f"{reason}, so it is left out",
            "Nothing here uses it; rewards and environments of yours find none: pip uninstall torchvision.",
        )
    antlr = installed("antlr4-python3-runtime")
    if installed("math-verify") is not None and antlr is not None and antlr.startswith("4.9."):
        yield fail(
            "versions",
            f"antlr4-python3-runtime {antlr}, which omegaconf and hydra pin, breaks math-verify",
            "Use an environment without omegaconf and hydra, or no reward of kind: math.",
        )


def look_at_devices(launch: LaunchConfig) -> Iterator[Finding]:
    """Count devices, and compare with the ranks that are asked for."""
    import torch

    from holdfast.processor import bfloat16_unit, usable_cores

    gpus, visible, ranks = cuda_devices(), torch.cuda.is_available(), resolve_ranks(launch)
    cores, unit = usable_cores(), bfloat16_unit()
    host = f"{cores} cores, {size_words(psutil.virtual_memory().total)} of memory"
    if visible and launch.device != "cpu":
        yield _on_gpus(ranks, host)
        return
    unused = f"the driver shows {gpus} GPUs, and torch {torch.__version__} uses none"
    if launch.device == "cuda":
        why = unused if gpus else "there is no GPU"
        fix = "Set launch.device: cpu or auto, or install a CUDA build of torch."
        yield fail("devices", f"launch.device: cuda, but {why}", fix)
    elif gpus and not visible:
        fix = "Install a CUDA build of torch that this driver can run."
        yield warn("devices", f"{unused}: the run would compute on the CPU", fix)
    elif ranks * (launch.named_threads or 1) > cores:
        text = f"{ranks} ranks with {launch.named_threads or 1} threads each share {host}"
        yield warn("devices", text, "Lower launch.ranks or launch.threads_per_rank.")
    else:
        advice = f"; {unit} multiplies bfloat16, by parallel.compute_dtype: bfloat16" if unit else ""
        yield ok("devices", f"no GPU is used; {host}{advice}")


def _on_gpus(ranks: int, host: str) -> Finding:
    import torch

    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    free = size_words(min(free_bytes for free_bytes, _ in memory))
    summary = f"{count} x {name}, {free} free of {size_words(memory[0][1])}; {host}"
    if not under_torchrun() and ranks > count:
        return fail("devices", f"{ranks} ranks and {summary}", f"Set launch.ranks: {count}, or launch.device: cpu.")
    used = max(1 - free_bytes / total for free_bytes, total in memory)
    if used > _BUSY:
        return warn("devices", f"{summary}: another process uses {used:.0%} of one", "See nvidia-smi.")
    return ok("devices", summary)


def look_at_ranks(launch: LaunchConfig) -> Iterator[Finding]:
    """Let the real ranks meet, and add numbers over all of them."""
    start = time.perf_counter()
    if under_torchrun():
        outcome = meet_ranks(launch)
    else:
        with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as folder:
            failure = _started(launch, Path(folder))
            if failure is not None:
                yield fail("ranks", failure, "Look at the network of this machine, its GPUs and NCCL_DEBUG=INFO.")
                return
            outcome = json.loads((Path(folder) / OUTCOME).read_text(encoding="utf-8"))
    yield ok(
        "ranks",
        f"{outcome['ranks']} over {outcome['backend']} on {outcome['hosts']} host(s) add 1 MiB in "
        f"{outcome['milliseconds']:.1f} ms; {since(start)} in all",
    )


def _started(launch: LaunchConfig, folder: Path) -> str | None:
    """Start ranks as a run does; return what went wrong with them."""
    (folder / TASK).write_text(launch.model_dump_json(), encoding="utf-8")
    command = [*python_module("holdfast.features.plan.checks.machine"), "launch", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=_DOCTOR_RANKS_SECONDS)
    except subprocess.TimeoutExpired:
        end_launcher(process)
        return f"they did not meet within {_DOCTOR_RANKS_SECONDS:g} s"
    if process.returncode == 0:
        return None
    return " ".join(line.strip() for line in output.splitlines()[-6:] if line.strip()) or f"exit {process.returncode}"


def look_at_place(config: TrainingConfig, planned_bytes: Callable[[], int | None]) -> Iterator[Finding]:
    """Write a file durably where checkpoints will be, remove it, and compare the free space with what they need.

    Args:
        config: Of the run.
        planned_bytes: Returns those of one checkpoint; None where nobody knows.
    """
    storage = _storage_of(checkpoint_place(run_directory(config), config))
    folder, data = fresh("doctor-", "0"), os.urandom(_TRIED_BYTES)
    start = time.perf_counter()
    try:
        storage.make(folder)
        with storage.create(f"{folder}/file") as file:
            file.write(data)
        seconds = time.perf_counter() - start
    except OSError as error:
        reason = f"{storage.root} cannot be written: {error.strerror or error}"
        yield fail("place", reason, "Choose another run.dir, or mend its permissions.")
        return
    finally:
        with contextlib.suppress(OSError):  # the finding says why nothing was written
            storage.remove(folder)
    checkpoint_bytes = planned_bytes()
    speed, free, keep = _TRIED_BYTES / max(seconds, 1e-6), storage.free_bytes(), config.checkpoint.keep
    summary = f"{storage.root} writes {size_words(speed)} a second to the disk"
    summary += "" if free is None else f", {size_words(free)} free"
    needed = (checkpoint_bytes or 0) * (keep.last + sum(best.count for best in keep.best) + 2)
    if free is not None and needed > free:
        needs = f"the checkpoints that are kept, and two more, take about {size_words(needed)}"
        fix = "Free space, lower checkpoint.keep.last, or choose another run.dir."
        yield fail("place", f"{summary}; {needs}", fix)
    elif speed < _SLOW:
        yield warn("place", f"{summary}, which is slow", "Set checkpoint.background: true, or choose another run.dir.")
    else:
        yield ok("place", summary)
    if checkpoint_bytes is None:
        yield unknown("place", "whether checkpoints have room there: no plan says how large they are")


def _storage_of(path: str | Path) -> Storage:
    """Return the storage of checkpoints; for a directory that does not exist, that of its nearest existing parent."""
    storage = open_storage(path)
    if not isinstance(storage, LocalStorage):
        return storage
    root = Path(storage.root).resolve()
    return LocalStorage(next(place for place in (root, *root.parents) if place.is_dir()))


def meet_ranks(launch: LaunchConfig) -> dict[str, Any]:
    """Join the other ranks and add numbers; return the same on all ranks.

    Raises:
        UserError: The sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from holdfast.parallel.collectives import RankGroup
    from holdfast.parallel.mesh import joined_world

    with joined_world(launch.model_copy(update={"timeout_minutes": 1.0})) as world:
        numbers = torch.full((_NUMBERS,), float(world.rank + 1), device=world.device)
        dist.all_reduce(numbers)  # the first one opens the connections
        expected = world.size * (world.size + 1) / 2
        if not bool((numbers == expected).all()):
            message = f"{world.size} ranks add up to {numbers[0].item():g} instead of {expected:g}."
            raise UserError(message)
        start = time.perf_counter()
        dist.all_reduce(numbers)
        numbers[0].item()
        milliseconds = 1000 * (time.perf_counter() - start)
        ranks = RankGroup(1.0)
        hosts = len(set(ranks.gather(socket.gethostname())))
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        ranks.close()
        return {"ranks": world.size, "backend": backend, "hosts": hosts, "milliseconds": milliseconds}


def main(role: str, folder: Path) -> int:
    """Start the ranks, or be one of them; rank 0 writes the outcome."""
    launch = LaunchConfig.model_validate_json((folder / TASK).read_text(encoding="utf-8"))
    if role == "launch":
        command = [*python_module("holdfast.features.plan.checks.machine"), "rank", str(folder)]
        alone = launch.model_copy(update={"max_restarts": 0, "min_ranks": None})
        return launch_local(command, resolve_ranks(launch), alone, folder / "run")
    try:
        outcome = meet_ranks(launch)
    except HoldfastError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    temporary = folder / f"{OUTCOME}.{os.getpid()}"
    temporary.write_text(json.dumps(outcome), encoding="utf-8")
    temporary.replace(folder / OUTCOME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
