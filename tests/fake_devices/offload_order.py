"""A process that offloads tensors of a fake GPU: python -m tests.fake_devices.offload_order [SEED...].

For each module it prints the order of copies and the races of it as it is, of faults that are written down here, and of
mutants that are drawn, one for each seed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

TOKENS, WIDTH = 64, 32

FAULTS = {
    "activations": {
        "copies do not wait for what computes": (
            "        self._stream.wait_event(torch.cuda.current_stream().record_event())\n", ""
        ),
        "memory is freed before it is copied": (
            "            torch.cuda.current_stream().wait_event(block_pass.copied)\n", "            pass\n"
        ),
        "a backward pass does not wait for what is fetched": (
            "            torch.cuda.current_stream().wait_event(block_pass.fetched)\n", "            pass\n"
        ),
        "what is fetched is not kept for the copy": (
            "                target.record_stream(self._stream)\n", "                pass\n"
        ),
        "the event is of the other stream": (
            "event: torch.cuda.Event = self._stream.record_event()",
            "event: torch.cuda.Event = torch.cuda.current_stream().record_event()",
        ),
    },
    "host_steps": {
        "copies do not wait for what computes": (
            "        self._stream.wait_event(torch.cuda.current_stream().record_event())\n", ""
        ),
        "a gradient is freed before it is copied": (
            "            local_part(gradient).record_stream(self._stream)\n", "            pass\n"
        ),
        "the step does not wait for gradients": ("            self._stream.synchronize()\n", "            pass\n"),
        "gradients are copied when the backward pass has ended": (
            "        if self._last:", "        if False:"
        ),
        "weights are not written back": ("copy_(local_part(pair.twin.data)", "copy_(local_part(pair.parameter.data)"),
    },
}  # fmt: skip
"""Module -> name -> text of the module, and what stands there instead."""
KINDS = {"activations": ("plain", "recomputed", "failing"), "host_steps": ("updates",)}


def mutant(source: str, seed: int) -> str:
    """Return the source without one statement about streams, drawn by a seed: a wait, a record, or a stream's block."""
    tree = ast.parse(source)
    names = {"wait_event", "record_stream", "stream", "synchronize"}
    drawn = random.Random(seed)

    def concerns(node: ast.AST) -> bool:
        call = (
            node.value
            if isinstance(node, ast.Expr)
            else node.items[0].context_expr
            if isinstance(node, ast.With)
            else None
        )
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names

    bodies = [
        (body, index)
        for node in ast.walk(tree)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(body, list)
        for index, statement in enumerate(body)
        if concerns(statement)
    ]
    body, index = drawn.choice(bodies)
    statement = body[index]
    body[index : index + 1] = statement.body if isinstance(statement, ast.With) else [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree))


def main(*seeds: str) -> None:
    """Execute passes of all forms."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    importlib.import_module("torch._dynamo")  # reads names of torch, before stand-ins have them

    from holdfast.optim import host_steps
    from holdfast.parallel import activations

    for subject in (activations, host_steps):
        title = subject.__name__.rpartition(".")[2]
        source = Path(str(subject.__file__)).read_text(encoding="utf-8")
        forms = {"as it is": source}
        for name, (old, new) in FAULTS[title].items():
            assert source.count(old) == 1, name
            forms[name] = source.replace(old, new)
        forms |= {f"seed {seed}": mutant(source, int(seed)) for seed in seeds}
        for name, text in forms.items():
            module: Any = types.ModuleType("mutated")
            sys.modules["mutated"] = module  # dataclasses look their module up
            exec(compile(text, "mutated", "exec"), module.__dict__)
            for kind in KINDS[title]:
                print("order " + json.dumps([title, name, kind, *passes(module, kind)]), flush=True)


def passes(module: Any, kind: str) -> tuple[list[str], list[str]]:
    """Run passes of four blocks; return the order of copies, and races."""
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    from holdfast.features.plan.execution import fake_devices
    from tests.fake_devices.races import Detector, Event, Stream, on_stream

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")

        def forward(self, hidden: Tensor) -> Tensor:
            def computed(states: Tensor) -> Tensor:
                return states + self.linear(states.sin())

            result: Tensor = (
                checkpoint(computed, hidden, use_reentrant=False, preserve_rng_state=False)
                if kind == "recomputed"
                else computed(hidden)
            )
            return result

    detector, Stream.count = Detector(), 0
    Stream.current, Stream.host = Stream(), Stream()
    replaced = {
        "torch.cuda:Stream": Stream,
        "torch.cuda:Event": Event,
        "torch.cuda:current_stream": lambda *_: Stream.current,
        "torch.cuda:stream": on_stream,
        "torch:Tensor.record_stream": detector.told,
    }
    fake_devices.REPLACED |= replaced
    with fake_devices.fake_devices("cuda") as mode, mode:
        blocks = [Block() for _ in range(4)]
        with detector:
            if kind == "updates":
                update(module, blocks)
            else:
                offload = module.ActivationOffload("cuda")
                wrapped = [module.OffloadedBlock(block, offload, stays=block is blocks[-1]) for block in blocks]
                run(wrapped, fails_behind=2 if kind == "failing" else None)
            gc.collect()  # what a pass that failed has left
    return detector.order, sorted(set(detector.races))


def run(blocks: list[Any], fails_behind: int | None) -> None:
    """Pass forward and backward; the backward pass may fail when it has come back behind so many blocks."""
    import torch

    hidden = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    for number, block in enumerate(blocks, 1):
        hidden = block(hidden)
        if number == fails_behind:
            hidden.register_hook(fails)
    with contextlib.suppress(Interrupted):
        hidden.sum().backward()


def update(module: Any, blocks: list[Any]) -> None:
    """Make two updates of two micro-batches in host memory."""
    import numpy as np
    import torch

    from holdfast.types import host_values_from

    optimizer = torch.optim.SGD([value for block in blocks for value in block.parameters()], lr=0.1)
    steps = module.HostSteps(optimizer)
    for _ in range(2):
        for last in (False, True):
            steps.start_micro_batch(first=not last, last=last)
            run(blocks, fails_behind=None)
        unchanged = host_values_from(lambda tensor, _: np.zeros(tuple(tensor.shape), bool))
        with unchanged, steps.in_place(optimizer):
            optimizer.step()
            steps.write_back()


class Interrupted(Exception):
    """A backward pass that fails."""


def fails(*_: object) -> None:
    """Fail."""
    raise Interrupted


if __name__ == "__main__":
    main(*sys.argv[1:])
