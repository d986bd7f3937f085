"""What becomes of a run's last saves: those that fail, that hang, and that nobody waits for."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import verify
from holdfast.checkpoint.errors import DirectoryTaken
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training import directory
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.run import Training
from holdfast.training.setup.begin import build_run
from tests.crash.disks import Remount
from tests.crash.disks import disk as disk  # noqa: PLC0414 - a fixture
from tests.crash.runs import saved_steps, values_of
from tests.training.cases import run, tree

REHEARSED = {"rehearsal": True}


class Channel:
    """A failure channel that does something where saves are published, from one save on."""

    def __init__(self, inner: Any, first: int, act: Callable[[], None]) -> None:
        self._inner, self._first, self._act = inner, first, act
        self._saves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def in_background(self, name: str) -> None:
        self._inner.in_background(name)
        self._saves += name == "begin"
        if name == "publish" and self._saves >= self._first:
            self._act()


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield said


def run_with_full_disk(world: World, values: dict[str, Any], first: int, times: int) -> tuple[Any, str]:
    """Run; so many saves, from one on, find no room when they are to be published. Return the end and what it said."""
    left = [times]

    def act() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    with printed() as said:
        outcome = run(replace(world, failure=Channel(world.failure, first, act)), values)  # type: ignore[arg-type]
    return outcome, said.getvalue()


@pytest.mark.parametrize("background", [True, False])
def test_a_last_save_that_fails_is_tried_again(pools: Any, tmp_path: Path, background: bool) -> None:
    values = values_of(tmp_path, steps=4, checkpoint={"max_failures": 1, "background": background})

    ends = pools(2).run(run_with_full_disk, values, 2, 1)

    assert [(outcome.step, outcome.stopped) for outcome, _ in ends] == [(4, None)] * 2
    assert saved_steps(tmp_path) == [2, 4]
    assert verify(str(tmp_path / "r/checkpoints/step-00000004")).step == 4


def test_what_is_told_of_a_last_save_that_fails(pools: Any, tmp_path: Path) -> None:
    values = values_of(tmp_path, steps=4, checkpoint={"max_failures": 1})

    _, said = pools(1).run(run_with_full_disk, values, 2, 1)[0]

    assert "No space left on device" in said
    assert "It is tried again; 0 more failures in a row are allowed." in said
    assert "Training goes on" not in said


def test_a_run_whose_last_save_fails_too_often_is_no_success(pools: Any, tmp_path: Path) -> None:
    values = values_of(tmp_path, steps=4, checkpoint={"max_failures": 1})

    errors = pools(2).errors(run_with_full_disk, values, 2, 9)

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert saved_steps(tmp_path) == [2]


def test_a_save_that_ends_with_the_run_is_in_its_events(pools: Any, tmp_path: Path) -> None:
    saves = {"every_steps": 4, "at_end": False}
    pools(1).run(run, values_of(tmp_path, steps=4, checkpoint=saves))
    events = [json.loads(line) for line in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    shutil.rmtree(tmp_path / "r/checkpoints")

    name, message = pools(1).errors(run, values_of(tmp_path, steps=6, checkpoint=saves))[0]

    assert [event["saved"] for event in events if event["event"] == "checkpoint"] == [4]
    assert name == "NoCheckpoint"
    assert "saved a checkpoint of step 4" in message


RAISES = "def at_three(event):\n    if event.step == 3:\n        raise ValueError('a bug of the user')\n"


def run_into_an_error_while_a_save_hangs(world: World, values: dict[str, Any], base: str) -> tuple[str, float, str]:
    """Return the error, the seconds from it to the end of the run, and what was said."""
    free, began = threading.Event(), [0.0]

    def hang() -> None:
        began[0] = time.monotonic()
        free.wait(120)

    try:
        with printed() as said, pytest.raises(Exception, match="a bug of the user") as caught:
            run(replace(world, failure=Channel(world.failure, 1, hang)), values, base)  # type: ignore[arg-type]
        return type(caught.value).__name__, time.monotonic() - began[0], said.getvalue()
    finally:
        free.set()


def test_an_error_is_told_although_a_save_hangs(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(RAISES)
    saves = {"timeout_minutes": 0.05, "grace_seconds": 2, "rehearsal": False}
    values = values_of(tmp_path, steps=6, checkpoint=saves, observers=["watch.py:at_three"])

    name, seconds, said = pools(1).run(run_into_an_error_while_a_save_hangs, values, str(tmp_path))[0]

    assert name == "ObserverFailed"
    assert seconds < 60
    assert "the save in flight hangs in phase 'publish' and is given up" in said
    assert saved_steps(tmp_path) == []


def raise_while_another_rank_saves(world: World, values: dict[str, Any]) -> str:
    """All ranks raise the same error, rank 1 a second later, and the save takes longer than that."""
    plain = LocalStorage.publish

    def slow(self: LocalStorage, staging: str, final: str) -> None:
        time.sleep(3.0)
        plain(self, staging, final)

    def step(training: Training) -> dict[str, float] | None:
        if training.model.state.step == 2:
            LocalStorage.publish = slow  # type: ignore[method-assign]
            time.sleep(1.2 * world.rank)
            raise ArithmeticError("on all ranks")
        return sft_step(training)

    try:
        with printed() as said, pytest.raises(ArithmeticError):
            training = build_run(from_mapping(values, SFTConfig), Path(), world)
            fit(training, partial(step, training), partial(evaluate, training.evaluation))
        return said.getvalue()
    finally:
        LocalStorage.publish = plain  # type: ignore[method-assign]


def test_a_rank_that_raises_first_waits_for_the_others_before_it_saves(pools: Any, tmp_path: Path) -> None:
    values = values_of(tmp_path, steps=4, checkpoint={"every_steps": 3})

    for said in pools(2).run(raise_while_another_rank_saves, values):
        assert "checkpoint of step 2 is on disk, saved before the error" in said
    assert saved_steps(tmp_path) == [2]


@pytest.mark.slow
def test_a_checkpoint_finds_the_room_of_those_that_it_replaces(pools: Any, disk: tuple[Path, Remount]) -> None:
    """Room for six and a half: three that stay, what a resumed run began with, one that is written and one deleted."""
    place, _ = disk
    values = tree(
        str(place), steps=5, checkpoint={"every_steps": 1, "keep": {"last": 3}, "export_at_end": False} | REHEARSED
    )
    pools(2).run(run, values)
    size = sum(file.stat().st_size for file in (place / "r/checkpoints/step-00000005").rglob("*"))
    shutil.rmtree(place / "r")
    free = shutil.disk_usage(place).free
    (place / "filler").write_bytes(bytes(free - int(6.5 * size)))

    pools(2).run(run, values)
    outcome = pools(2).run(run, values | {"steps": 8})[0]

    assert outcome.step == 8
    assert saved_steps(place)[-3:] == [6, 7, 8]


@pytest.mark.slow
def test_a_disk_without_that_room_is_refused_naming_what_is_there(pools: Any, disk: tuple[Path, Remount]) -> None:
    place, _ = disk
    values = tree(
        str(place), steps=5, checkpoint={"every_steps": 1, "keep": {"last": 3}, "export_at_end": False} | REHEARSED
    )
    pools(2).run(run, values)
    size = sum(file.stat().st_size for file in (place / "r/checkpoints/step-00000005").rglob("*"))
    free = shutil.disk_usage(place).free
    (place / "filler").write_bytes(bytes(free - int(2.5 * size)))

    name, message = pools(2).errors(run, values | {"steps": 8})[0]

    assert name == "RehearsalFailed"
    assert "3 are kept and two more must fit" in message
    assert "beside the 2 that are there" in message, "the third is what the run goes on from, and stays"


def run_refused(world: World, values: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the error of a run that is refused, and who could take its directory while it was removed."""
    plain, seen = directory.remove, list[str]()

    def remove(place: Path) -> None:
        try:
            with Lease(LocalStorage(place / directory.CHECKPOINTS)):
                seen.append("taken")
        except DirectoryTaken:
            seen.append("held")
        plain(place)

    directory.remove = remove  # type: ignore[assignment]
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the name is compared
            run(world, values)
        return type(caught.value).__name__, seen
    finally:
        directory.remove = plain  # type: ignore[assignment]


def test_a_directory_is_removed_while_nobody_else_can_take_it(pools: Any, disk: tuple[Path, Remount]) -> None:
    place, _ = disk
    free = shutil.disk_usage(place).free
    (place / "filler").write_bytes(bytes(free - 900_000))

    name, seen = pools(1).run(run_refused, tree(str(place), checkpoint={"keep": {"last": 9}} | REHEARSED))[0]

    assert (name, seen) == ("RehearsalFailed", ["held"])
    assert not (place / "r").exists()
