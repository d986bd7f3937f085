"""What rank pools run with compiled blocks, by the compiler's front end or by one that fails."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.compiler import BlockCompiler
from holdfast.parallel.forms import Forms
from holdfast.parallel.mesh import World
from holdfast.training.directory import EVENTS
from holdfast.training.setup import model
from tests.distributed.cases import train
from tests.training.cases import run


def refused_by_its_machine(*_: Any) -> Any:
    """Stand where a compiler's last stage stands, on a machine that lacks what it needs."""
    raise RuntimeError("no C++ compiler was found\nand more lines")


@contextmanager
def compiled_by(backend: str | Callable[..., Any]) -> Iterator[None]:
    """Let modules be compiled by another backend than inductor, which takes minutes; the front end is the same."""
    before = BlockCompiler.__init__
    BlockCompiler.__init__ = lambda compiler: before(compiler, backend)  # type: ignore[method-assign, assignment]  # of this process
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield
    finally:
        BlockCompiler.__init__ = before  # type: ignore[method-assign]
        assert not torch._dynamo.config.suppress_errors


def train_compiled(
    world: World, tree: dict[str, Any], rows: Any, steps: int, failing: Sequence[int] = ()
) -> dict[str, Any]:
    """Train with blocks that are compiled, but for ranks whose compiler fails.

    Returns:
        What `train` does, and what was compiled and printed.
    """
    printed = io.StringIO()
    backend = refused_by_its_machine if world.rank in failing else "aot_eager"
    with compiled_by(backend), redirect_stdout(printed):
        outcome = train(world, tree, rows, steps)
        counters = torch._dynamo.utils.counters
        return outcome | {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "printed": [line for line in printed.getvalue().splitlines() if line.startswith("blocks: ")],
            "breaks": dict(counters["graph_break"]),
        }


def runs_of_forms(world: World, trees: list[dict[str, Any]], failing: Sequence[int] = ()) -> list[list[str]]:
    """Run whole runs one after the other, by the compiler's front end; return what each printed of its form.

    Args:
        world: Of this rank.
        trees: Of the runs.
        failing: Those of them whose compiler fails.
    """
    printed = []
    for number, tree in enumerate(trees):
        output = io.StringIO()
        with compiled_by(refused_by_its_machine if number in failing else "aot_eager"), redirect_stdout(output):
            run(world, tree)
        printed.append([line for line in output.getvalue().splitlines() if "added up in another order" in line])
    return printed


def fails_after_the_check(world: World, values: dict[str, Any], failing: Sequence[int]) -> None:
    """Run a whole run whose compiler fails on some ranks once step 1 has begun."""
    front_end = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        if world.rank in failing and (Path(values["run"]["dir"]) / values["run"]["name"] / EVENTS).exists():
            refused_by_its_machine()
        return front_end(graph, inputs)

    with compiled_by(backend), redirect_stdout(io.StringIO()):
        run(world, values)


def waits(program: Callable[..., Any], *arguments: Any) -> Any:
    """Run a program slowly."""
    time.sleep(0.02)
    return program(*arguments)


def errs(program: Callable[..., Any], *arguments: Any) -> Any:
    """Run a program, and give other numbers where there are as many tokens as in a micro-batch."""
    long = any(isinstance(one, torch.Tensor) and max(one.shape, default=0) > 1000 for one in arguments)

    def spoilt(value: torch.Tensor) -> torch.Tensor:
        return value * 1.25 if long and value.is_floating_point() else value

    return tree_map_only(torch.Tensor, spoilt, program(*arguments))


def train_as_on_a_card(
    world: World, tree: dict[str, Any], rows: Any, steps: int, run_program: Callable[..., Any]
) -> dict[str, Any]:
    """Train where forms are timed and blocks compiled by default; `run_program` runs what the compiler made.

    Returns:
        What `train` does, and what was printed.
    """
    front_end = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        return partial(run_program, front_end(graph, inputs))

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, compiled_by(backend), redirect_stdout(output):
        patch.setattr(model, "Forms", lambda gather, timed, rank: Forms(gather, timed=True, rank=rank))  # noqa: ARG005 - a card's
        patch.setattr(SFTConfig, "compiles_blocks", lambda *_: True)
        outcome = train(world, tree, rows, steps)
    return outcome | {"printed": [line for line in output.getvalue().splitlines() if line.startswith("blocks: ")]}
