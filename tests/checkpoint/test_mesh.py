"""On another mesh a rank is another one: it gets no random state of its own, and the run says so."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import Block
from tests.crash.runs import values_of
from tests.distributed.toys import Toy, shard
from tests.training.cases import run

EXACT = "weights, optimizer, random state and order of rows continue bit for bit"
MOVED = (
    "the checkpoint was written by replicate=1 x shard=2, this run is replicate=2 x shard=1: weights, optimizer and "
    "order of rows continue exactly; sums over ranks are added in another order, and dropout draws new numbers"
)


def save_and_load(world: World, path: str, replicate: int) -> tuple[bool, Any, bool, bool]:
    """Save on 1 x 2, load on another mesh; return what was restored, and whether chance went on where it was."""
    toy = Toy(Block())
    shard(world, toy, replicate=1, shard=2)
    torch.manual_seed(100 + world.rank)
    checkpoint.save(path, toy, rank_extra=("rank", world.rank))
    then = torch.rand(3)
    other = Toy(Block())
    shard(world, other, replicate=replicate, shard=2 // replicate)
    torch.manual_seed(200 + world.rank)
    fresh = torch.rand(3)
    torch.manual_seed(200 + world.rank)

    found = checkpoint.load(path, other)

    now = torch.rand(3)
    return found.exact, found.rank_extra, torch.equal(now, then), torch.equal(now, fresh)


@pytest.mark.parametrize("replicate", [1, 2])
def test_random_state_is_restored_on_the_same_mesh_alone(pools: Any, tmp_path: Path, replicate: int) -> None:
    found = pools(2).run(save_and_load, str(tmp_path / "step-00000001"), replicate)

    same = replicate == 1
    assert found == [(same, ("rank", rank) if same else None, same, not same) for rank in range(2)]


def run_and_listen(world: World, values: dict[str, Any]) -> list[str]:
    """Run, and return what this rank printed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        run(world, values)
    return told.getvalue().splitlines()


@pytest.mark.parametrize(("replicate", "expected"), [(1, EXACT), (2, MOVED)])
def test_a_resumed_run_says_what_continues_bit_for_bit(
    pools: Any, tmp_path: Path, replicate: int, expected: str
) -> None:
    pools(2).run(run, values_of(tmp_path, steps=2))

    lines, silent = pools(2).run(run_and_listen, values_of(tmp_path, steps=4, parallel={"replicate": replicate}))

    assert [line for line in lines if line in {EXACT, MOVED}] == [expected]
    assert silent == []


def test_another_number_of_ranks_is_said_too(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, values_of(tmp_path, steps=2))

    lines = pools(1).run(run_and_listen, values_of(tmp_path, steps=4))[0]

    assert any(line.startswith("the checkpoint was written by replicate=1 x shard=2, this run is") for line in lines)
    assert EXACT not in lines
