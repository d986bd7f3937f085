"""What one rank alone cannot save is the same named error on all ranks, at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.format.manifest import About
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import commit
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, optimizer_of, refused_save, step

TIMEOUT_MINUTES = 1.0


def started(world: World) -> None:
    """Nothing: that the ranks live is enough."""


class Odd:
    """A type that has no written form."""


class OddStorage(LocalStorage):
    """Fails in ways that no operating system does."""

    def __init__(self, root: Path, *, where: str) -> None:
        super().__init__(root)
        self.where = where

    def create(self, path: str) -> Any:
        if self.where == "rank state" and path.endswith(("rank/shard-1.json", "rank/rank-00001.json")):
            raise TypeError("this storage is broken")
        return super().create(path)

    def free_bytes(self) -> int | None:
        if self.where == "free bytes":
            raise OSError(116, "Stale file handle", self.root)
        return super().free_bytes()


def save_what_rank_1_cannot(world: World, path: str, what: str, call: str) -> None:
    odd = Odd() if world.rank == 1 else None
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 0)
    if odd is not None and what == "param group":
        optimizer.param_groups[0]["odd"] = odd
    if odd is not None and what == "frozen parameter":
        toy.language_model.blocks[0].trained.weight.requires_grad_(False)  # type: ignore[union-attr]
    if call == "rehearse":
        optimizer.state.clear()
        checkpoint.rehearse(str(Path(path).parent), toy, optimizer, timeout_minutes=TIMEOUT_MINUTES)
        return
    checkpoint.save(
        path,
        toy,
        optimizer,
        extra=odd if what == "extra" else None,
        rank_extra=odd if what == "rank_extra" else None,
        timeout_minutes=TIMEOUT_MINUTES,
    )


@pytest.mark.parametrize(
    ("what", "call", "name", "message"),
    [
        ("extra", "save", "UnsavableExtra", "extra holds a tests.checkpoint.test_one_rank_fails.Odd, which has no"),
        ("rank_extra", "save", "UnsavableExtra", "holds a tests.checkpoint.test_one_rank_fails.Odd, which has no"),
        ("param group", "save", "UnsavableOptimizer", "hyper-parameter 'odd' is a tests.checkpoint"),
        ("frozen parameter", "save", "UnsavableOptimizer", "blocks.0.trained.weight, which is frozen"),
        ("param group", "rehearse", "UnsavableOptimizer", "hyper-parameter 'odd' is a tests.checkpoint"),
        ("frozen parameter", "rehearse", "UnsavableOptimizer", "blocks.0.trained.weight, which is frozen"),
    ],
)
def test_what_one_rank_cannot_save_is_an_error_on_all(
    pools: Any, tmp_path: Path, what: str, call: str, name: str, message: str
) -> None:
    path = str(tmp_path / "step-00000001")
    pools(2).run(started)  # imports are not what is timed
    began = time.monotonic()

    errors = pools(2).errors(save_what_rank_1_cannot, path, what, call)

    assert time.monotonic() - began < 30 * TIMEOUT_MINUTES
    assert errors[0] == errors[1]
    assert errors[0][0] == name
    assert message in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def commit_on_odd_storage(world: World, directory: Path, where: str) -> None:
    toy = build(world)
    ranks = RankGroup(TIMEOUT_MINUTES)
    storage = OddStorage(directory, where=where if world.rank == 1 or where == "free bytes" else "")
    commit(take(toy), storage, About("run", 1), ranks)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("rank state", "rank 1 could not save in phase 'rank state': TypeError: this storage is broken."),
        ("free bytes", "rank 0 could not save in phase 'begin': Stale file handle"),
    ],
)
def test_an_error_of_any_kind_on_one_rank_ends_the_save_on_all(
    pools: Any, tmp_path: Path, where: str, message: str
) -> None:
    pools(2).run(started)  # imports are not what is timed
    began = time.monotonic()

    errors = pools(2).errors(commit_on_odd_storage, tmp_path, where)

    assert time.monotonic() - began < 30 * TIMEOUT_MINUTES
    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert message in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def save_with_other_values(world: World, path: str, what: str) -> None:
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 0)
    own = 0.25 + world.rank
    if what == "param group":
        optimizer.param_groups[0]["weight_decay"] = own
    else:
        next(state for state in optimizer.state.values())["seen"] = {"average": (3, own)}
    checkpoint.save(path, toy, optimizer, timeout_minutes=TIMEOUT_MINUTES)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("param group", "groups.0.hyperparameters.weight_decay: 0.25 and 1.25"),
        ("state", "values.blocks.0.trained.weight.seen.dict.0.1.tuple.1: 0.25 and 1.25"),
    ],
)
def test_what_optimizers_hold_besides_tensors_must_be_the_same_on_all_ranks(
    pools: Any, tmp_path: Path, what: str, name: str
) -> None:
    said = refused_save(pools, tmp_path, save_with_other_values, what)

    assert f"ranks 0 and 1 disagree on the optimizer's {name}. Only one would be saved." in said
