"""What rank pools run with compiled blocks, by the compiler's front end or by one that fails."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from holdfast.parallel.compiler import BlockCompiler
from holdfast.parallel.mesh import World
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


def runs_of_forms(world: World, trees: list[dict[str, Any]]) -> list[list[str]]:
    """Run whole runs one after the other, by the compiler's front end; return what each printed of its form."""
    printed = []
    for tree in trees:
        output = io.StringIO()
        with compiled_by("aot_eager"), redirect_stdout(output):
            run(world, tree)
        printed.append([line for line in output.getvalue().splitlines() if "added up in another order" in line])
    return printed
