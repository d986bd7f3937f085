"""A process that offloads activations of a fake GPU: python -m tests.fake_devices.offload_order [SEED...].

It prints the order of copies and the races of the module as it is, of faults that are written down here, and of
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
    "the event is recorded before the copies": (
        "        with torch.cuda.stream(self._stream):\n            for target",
        "        event = self._stream.record_event()\n        with torch.cuda.stream(self._stream):\n"
        "            for target",
    ),
    "the event is of the other stream": (
        "event: torch.cuda.Event = self._stream.record_event()",
        "event: torch.cuda.Event = torch.cuda.current_stream().record_event()",
    ),
}  # fmt: skip
"""Name -> text of the module, and what stands there instead."""


def mutant(source: str, seed: int) -> str:
    """Return the source without one statement about streams, drawn by a seed: a wait, a record, or a stream's block."""
    tree = ast.parse(source)
    names = {"wait_event", "record_stream", "stream"}
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

    from holdfast.parallel import activations

    source = Path(activations.__file__).read_text(encoding="utf-8")
    forms = {"as it is": source}
    for name, (old, new) in FAULTS.items():
        assert source.count(old) == 1, name
        forms[name] = source.replace(old, new)
        if name == "the event is recorded before the copies":
            forms[name] = forms[name].replace("        event: torch.cuda.Event = self._stream.record_event()\n", "")
    forms |= {f"seed {seed}": mutant(source, int(seed)) for seed in seeds}
    for name, text in forms.items():
        module: Any = types.ModuleType("mutated")
        sys.modules["mutated"] = module  # dataclasses look their module up
        exec(compile(text, "mutated", "exec"), module.__dict__)
        for kind in ("plain", "recomputed", "failing"):
            print("order " + json.dumps([name, kind, *passes(module, kind)]), flush=True)


def passes(module: Any, kind: str) -> tuple[list[str], list[str]]:
    """Run a forward and a backward pass of four blocks; return the order of copies, and races."""
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
    Stream.current = Stream()
    replaced = {
        "torch.cuda:Stream": Stream,
        "torch.cuda:Event": Event,
        "torch.cuda:current_stream": lambda *_: Stream.current,
        "torch.cuda:stream": on_stream,
        "torch:Tensor.record_stream": detector.told,
    }
    fake_devices.REPLACED |= replaced
    with fake_devices.fake_devices("cuda") as mode, mode:
        offload = module.ActivationOffload("cuda")
        blocks = [Block() for _ in range(4)]
        wrapped = [module.OffloadedBlock(block, offload, stays=block is blocks[-1]) for block in blocks]
        with detector:
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


class Interrupted(Exception):
    """A backward pass that fails."""


def fails(*_: object) -> None:
    """Fail."""
    raise Interrupted


if __name__ == "__main__":
    main(*sys.argv[1:])
