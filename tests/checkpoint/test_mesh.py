"""On another mesh a rank is another one: it gets no random state of its own, and the run says so."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import Block
from tests.checkpoint.damage import rewrite_manifest
from tests.crash.runs import log_of, values_of
from tests.distributed.toys import Toy, shard
from tests.training.cases import run

EXACT = "weights, optimizer, random state and order of rows are those of the checkpoint, bit for bit"
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


def small(turned: bool) -> nn.Module:
    """Return a layer on two ranks; turned, the second rank stands first on the mesh."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 0] if turned else [0, 1]), mesh_dim_names=("shard",))
    return fully_shard(nn.Linear(4, 4), mesh=mesh)


def save_and_turn(world: World, path: str) -> tuple[bool, Any, bool]:
    before, after = small(turned=False), small(turned=True)
    torch.manual_seed(100 + world.rank)
    checkpoint.save(path, before, rank_extra=("rank", world.rank))
    draws = [torch.rand(3, generator=torch.Generator().manual_seed(100 + rank)) for rank in range(2)]

    found = checkpoint.load(path, after)

    return found.exact, found.rank_extra, torch.equal(torch.rand(3), draws[1 - world.rank])


def test_a_rank_s_own_state_goes_to_whoever_stands_in_its_place(pools: Any, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"

    found = pools(2).run(save_and_turn, str(path))

    assert sorted(file.name for file in (path / "rank").iterdir()) == ["shard-0.json", "shard-1.json"]
    assert found == [(True, ("rank", 1), True), (True, ("rank", 0), True)]


def save_copies(world: World, path: str) -> tuple[bool, Any]:
    """Save a model that each rank has whole, on a mesh of its own: places do not tell ranks apart."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(4, 4), mesh=mesh)
    checkpoint.save(path, layer, rank_extra=("rank", world.rank))
    found = checkpoint.load(path, layer)
    return found.exact, found.rank_extra


def test_ranks_that_a_mesh_does_not_tell_apart_are_told_by_their_number(pools: Any, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"

    found = pools(2).run(save_copies, str(path))

    assert sorted(file.name for file in (path / "rank").iterdir()) == ["rank-00000.json", "rank-00001.json"]
    assert found == [(True, ("rank", 0)), (True, ("rank", 1))]


def test_a_checkpoint_of_a_mesh_that_names_ranks_by_number_is_read_as_well(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, values_of(tmp_path, steps=2))
    saved = tmp_path / "r" / "checkpoints" / "step-00000002"
    assert sorted(file.name for file in (saved / "rank").iterdir()) == [
        "replicate-0.shard-0.json",
        "replicate-0.shard-1.json",
    ]
    for rank in range(2):
        (saved / "rank" / f"replicate-0.shard-{rank}.json").rename(saved / "rank" / f"rank-0000{rank}.json")
    rewrite_manifest(saved)

    pools(2).run(run, values_of(tmp_path, steps=4))

    straight = tmp_path / "straight"
    pools(2).run(run, values_of(straight, steps=4))
    assert log_of(tmp_path) == log_of(straight)
    names = {file.relative_to(saved.parent).as_posix() for file in saved.parent.rglob("rank/*")}
    assert "step-00000004/rank/replicate-0.shard-1.json" in names


def run_and_listen(world: World, values: dict[str, Any]) -> list[str]:
    """Run, and return what this rank printed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        run(world, values)
    return told.getvalue().splitlines()


@pytest.mark.cases(1)
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
