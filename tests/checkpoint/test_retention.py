"""Which checkpoints stay, counted by hand; and what a deletion may never do."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.errors import DirectoryTaken
from holdfast.checkpoint.format.manifest import NAME, Manifest
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.keep.retention import (
    BestRule,
    Retention,
    apply_retention,
    kept_steps,
    remove_leftovers,
    write_pins,
)
from holdfast.checkpoint.place.layout import TENSORS
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, newest_whole, optimizer_of, save_after, step
from tests.crash.cases import session_of
from tests.crash.faulty import die
from tests.crash.processes import run_doomed


def manifest(step: int, *, finite: bool = True, **metrics: float | None) -> Manifest:
    return Manifest("run", step, ("model",), {}, {}, metrics=metrics, finite=finite)


LOSSES = {10: 5.0, 20: 3.0, 30: 4.0, 40: 3.0, 50: 6.0, 60: 7.0}
FOUND = {step: manifest(step, loss=loss, reward=-loss) for step, loss in LOSSES.items()}


@pytest.mark.parametrize(
    ("policy", "options", "kept"),
    [
        pytest.param(Retention(last=2), {}, {50, 60}, id="the last two"),
        pytest.param(Retention(last=2, every=20), {}, {20, 40, 50, 60}, id="every twentieth"),
        pytest.param(Retention(2, best=[BestRule("loss", "min")]), {}, {40, 50, 60}, id="of equal ones the later"),
        pytest.param(Retention(2, best=[BestRule("loss", "min", 3)]), {}, {20, 30, 40, 50, 60}, id="the best three"),
        pytest.param(Retention(2, best=[BestRule("loss", "max")]), {}, {50, 60}, id="most is best"),
        pytest.param(Retention(2, best=[BestRule("reward", "max", 2)]), {}, {20, 40, 50, 60}, id="of another metric"),
        pytest.param(Retention(2, best=[BestRule("absent", "max", 2)]), {}, {50, 60}, id="of a metric nobody has"),
        pytest.param(Retention(2), {"pinned": {10, 99}}, {10, 50, 60}, id="pinned, one of them long gone"),
        pytest.param(Retention(2), {"needed": {30}}, {30, 50, 60}, id="the step it resumed from"),
    ],
)
def test_kept_steps_are_those_counted_by_hand(policy: Retention, options: dict[str, Any], kept: set[int]) -> None:
    assert kept_steps(FOUND, policy, **options) == kept


@pytest.mark.parametrize("last", [pytest.param(2, id="40-NaN in weights or in the metric")])
def test_what_is_not_finite_counts_neither_as_last_nor_as_best(last: int) -> None:
    found = FOUND | {
        40: replace(FOUND[40], metrics={"loss": None}),
        60: replace(FOUND[60], finite=False, metrics={"loss": 0.0}),
    }

    assert kept_steps(found, Retention(last, best=[BestRule("loss", "min")])) == {20, 40, 50}


def save_with_nan(world: World, directory: Path) -> list[list[int]]:
    """Save five steps, the third and fourth of them with NaN in a weight; return what each save deleted."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    session = session_of(LocalStorage(directory), world, background=False)
    deleted = []
    for number in range(1, 6):
        weight = next(parameter for parameter in toy.parameters() if parameter.requires_grad)
        before = weight.detach().clone()
        if number in {3, 4}:
            with torch.no_grad():
                weight.mul_(float("nan"))
        session.save(take(toy, optimizer), number, metrics={"loss": float(number)})
        saved = session.collect()
        assert saved is not None
        deleted.append(list(saved.deleted))
        with torch.no_grad():
            weight.copy_(before)
    return deleted


@pytest.mark.parametrize("ranks", [pytest.param(2, id="40-NaN in a weight of a real save")])
def test_a_checkpoint_with_nan_never_pushes_out_a_good_one(pools: Any, tmp_path: Path, ranks: int) -> None:
    """Keeping two: steps 3 and 4 are kept while they are the newest, and steps 1 and 2 stay until step 5 is there."""
    deleted = pools(ranks).run(save_with_nan, tmp_path)[0]

    assert deleted == [[], [], [], [3], [1, 4]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step")) == [
        "step-00000002",
        "step-00000005",
    ]


def save_with_parents(world: World, directory: Path) -> None:
    toy = build(world)
    optimizer = optimizer_of(toy)
    session = session_of(LocalStorage(directory), world, background=True)
    for number in range(1, 4):
        step(world, toy, optimizer, number)
        session.collect()
        session.save(take(toy, optimizer), number)
    session.collect()


def test_each_checkpoint_names_the_one_before_it(pools: Any, tmp_path: Path) -> None:
    pools(2).run(save_with_parents, tmp_path)

    bodies = [json.loads((tmp_path / f"step-0000000{step}" / NAME).read_text()) for step in (2, 3)]
    assert bodies[1]["manifest"]["parent"] == bodies[0]["xxh3_128"]
    assert bodies[1]["manifest"]["parent_step"] == 2


@pytest.fixture
def four(pools: Any, tmp_path: Path) -> LocalStorage:
    for number in range(1, 5):
        pools(2).run(save_after, str(tmp_path / f"step-0000000{number}"), 1)
    return LocalStorage(tmp_path)


def test_pruning_deletes_under_another_name_and_leaves_what_is_pinned(pools: Any, four: LocalStorage) -> None:
    write_pins(four, {1})

    # save_after names no step in the manifest's metrics; the directories decide
    deleted = apply_retention(four, Retention(last=2), wait=True)

    assert deleted == [2]
    assert four.names() == ["pins.json", "step-00000001", "step-00000003", "step-00000004"]


def test_a_damaged_checkpoint_is_neither_counted_nor_deleted(four: LocalStorage) -> None:
    (four.path("step-00000004") / NAME).write_bytes(b"{}")

    deleted = apply_retention(four, Retention(last=2), wait=True)

    assert deleted == [1]
    assert "step-00000004" in four.names()


def test_one_that_is_damaged_after_it_was_known_is_found_out(four: LocalStorage) -> None:
    assert apply_retention(four, Retention(last=4), wait=True) == []
    manifest = four.path("step-00000004") / NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"finite":true', b'"finite":tru2'))

    assert apply_retention(four, Retention(last=2), wait=True) == [1]
    assert "step-00000004" in four.names()


class Stubborn(LocalStorage):
    """A network file system that will not rename, for a while or one directory."""

    def __init__(self, root: Path, what: str = "step-") -> None:
        super().__init__(root)
        self.what = what

    def rename(self, old: str, new: str) -> None:
        if new.startswith(f".trash-{self.what}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), old)
        super().rename(old, new)


def save_stubbornly(world: World, directory: Path) -> tuple[str, ...]:
    toy = build(world)
    optimizer = optimizer_of(toy)
    session = session_of(Stubborn(directory), world, background=False)
    notes: tuple[str, ...] = ()
    for number in range(1, 4):
        session.save(take(toy, optimizer), number)
        saved = session.collect()
        notes += saved.notes if saved is not None else ()
    return notes


def test_a_deletion_that_fails_is_a_note_and_no_failure_of_the_save(pools: Any, tmp_path: Path) -> None:
    notes = pools(2).run(save_stubbornly, tmp_path)

    assert notes[0] == notes[1]
    assert len(notes[0]) == 1
    assert notes[0][0].startswith("step-00000001 could not be deleted: [Errno 116] Stale file handle")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_a_step_that_cannot_be_deleted_is_named_and_keeps_no_other_from_it(four: LocalStorage) -> None:
    notes: list[str] = []

    deleted = apply_retention(
        Stubborn(Path(four.root), "step-00000001"), Retention(last=2), notify=notes.append, wait=True
    )

    assert deleted == [2]
    assert four.names() == ["step-00000001", "step-00000003", "step-00000004"]
    assert [note.split(":")[0] for note in notes] == ["step-00000001 could not be deleted"]


@pytest.mark.parametrize("name", [".staging-step-00000005-abc", ".trash-step-00000001-abc"], ids="19-stale {}".format)
def test_what_killed_saves_and_deletions_left_is_ignored_then_cleared(four: LocalStorage, name: str) -> None:
    four.make(f"{name}/{TENSORS}")
    (four.path(name) / shard_file(0)).write_bytes(b"half")
    four.make(".quarantine-step-00000000-abc")

    choice = newest_whole(four, RankGroup())
    remove_leftovers(four)
    deadline_names = _wait_until_gone(four, name)

    assert choice is not None
    assert choice.name == "step-00000004"
    assert name not in deadline_names
    assert ".quarantine-step-00000000-abc" in deadline_names


def save_and_die(world: World, path: str) -> None:
    """Save, and be killed when the manifest is about to be written."""
    sys.addaudithook(lambda event, about: die() if event == "open" and str(about[0]).endswith(NAME) else None)
    save_after(world, path, 1)


def test_what_a_killed_save_of_somebody_s_own_loop_left_is_cleared_when_asked_for(pools: Any, tmp_path: Path) -> None:
    pools(1).run(save_after, str(tmp_path / "step-00000001"), 1)
    (ended,) = run_doomed(save_and_die, 1, str(tmp_path / "step-00000002"))
    left = list(tmp_path.glob(".staging-step-00000002-*"))
    with Lease(LocalStorage(tmp_path)), pytest.raises(DirectoryTaken):
        checkpoint.clean(str(tmp_path))
    held = list(tmp_path.glob(".staging-*"))

    checkpoint.clean(str(tmp_path))
    checkpoint.clean(str(tmp_path / "nowhere"))

    assert ended.was_killed
    assert len(left) == 1
    assert held == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lease-00000002.json", "step-00000001"]
    assert checkpoint.verify(str(tmp_path / "step-00000001")).step == 1


def _wait_until_gone(storage: LocalStorage, name: str) -> list[str]:
    import time

    deadline = time.monotonic() + 10
    while name in storage.names() and time.monotonic() < deadline:
        time.sleep(0.01)
    return storage.names()
