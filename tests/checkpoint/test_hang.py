"""A rank that hangs or is slow in a save: an error within the time-out, or patience below it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import verify
from holdfast.checkpoint.background import THREAD
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.keep.retention import Retention
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.session import Session
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.saving.emergency import wait_for_all
from tests.checkpoint.cases import build, optimizer_of, step
from tests.crash.cases import look_after, session_of, train_and_save
from tests.crash.faulty import SlowStorage
from tests.crash.processes import DoomedRanks, acknowledged, run_doomed

TIMEOUT = 4.0


def stop_in_phase(world: World, directory: Path, phase: str, background: bool, when: Path) -> None:
    """Stop rank 1, as a hung file system does, in the save of step 3."""
    counted = 0

    def reached(name: str) -> None:
        nonlocal counted
        counted += name == phase
        if world.rank == 1 and name == phase and counted == 3:  # not in what another thread reaches meanwhile
            when.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)

    session = session_of(LocalStorage(directory), world, seconds=TIMEOUT, background=background, reached=reached)
    train_and_save(world, session, directory)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("phase", "background"),
    [
        pytest.param("shards", False, id="21-SIGSTOP in shards, waiting"),
        pytest.param("rank state", True, id="21-SIGSTOP in rank state, in the background"),
        pytest.param("collect", False, id="21-SIGSTOP in collect, waiting"),
        pytest.param("read back", True, id="21-SIGSTOP in read back, in the background"),
    ],
)
def test_a_rank_that_hangs_in_a_save_is_an_error_within_the_time_out(
    pools: Any, tmp_path: Path, phase: str, background: bool
) -> None:
    directory, when = tmp_path / "checkpoints", tmp_path / "when"
    ranks = DoomedRanks(stop_in_phase, 2, directory, phase, background, when)
    try:
        (survivor,) = ranks.wait(60, of=[0])
        took = time.time() - float(when.read_text())
    finally:
        ranks.close()

    assert survivor.error is not None
    assert survivor.error[0] == "SaveFailed"
    assert survivor.code == 0
    assert took < TIMEOUT + 10
    assert acknowledged(directory) == [1, 2]
    assert pools(2).run(look_after, [directory])[0][0]["chosen"] >= 2


def save_slowly(world: World, directory: Path) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Save with a rank 1 that is slow, then with none; return the seconds of the first, and the notes of both."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    session = session_of(SlowStorage(directory, 2.5 * (world.rank == 1)), world, seconds=TIMEOUT * 3, background=False)
    session.save(take(toy, optimizer), 1)
    slow = session.collect()
    session.storage = LocalStorage(directory)
    session.save(take(toy, optimizer), 2)
    quick = session.collect()
    assert slow is not None
    assert quick is not None
    return slow.manifest.seconds, slow.notes, quick.notes


@pytest.mark.parametrize("ranks", [pytest.param(3, id="22-slow rank")])
def test_a_rank_that_is_slow_within_the_time_out_is_waited_for_and_named(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    found = pools(ranks).run(save_slowly, tmp_path)

    seconds, slow, quick = found[0]
    assert found == [found[0]] * ranks
    assert seconds >= 2.5
    assert quick == ()
    assert len(slow) == 1
    said = re.fullmatch(r"rank 1 took (\S+) s to write its part of a checkpoint, the others (\S+) s; look .*", slow[0])
    assert said is not None, slow
    assert float(said[1]) >= 2.5
    assert float(said[2]) < float(said[1]) / 2
    assert [verify(str(tmp_path / f"step-0000000{step}")).step for step in (1, 2)] == [1, 2]


def save_waited_for(world: World, storage: SlowStorage, minutes: float, slack_seconds: float) -> float:
    """Save while all ranks wait for it as a run does, and return how long that took; rank 1 is quick."""
    began = time.monotonic()
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    storage.seconds *= world.is_first
    session = session_of(storage, world, seconds=60, background=False)
    session.wait_for_all = lambda: wait_for_all(RankGroup(), session, minutes, slack_seconds)
    assets = {f"file-{number}.json": b"{}" for number in range(20)} if world.is_first else {}
    session.save(take(toy, optimizer, assets=assets), 1)
    session.collect()
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="22-save in which one file after the other is slow")])
def test_a_save_that_takes_longer_than_the_time_out_goes_on_while_it_moves(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    """Twenty files of rank 0, half a second each, in one phase; four seconds without a move would end it."""
    found = pools(ranks).run(save_waited_for, SlowStorage(tmp_path, 0.5, what=".json"), 0.02, 3.0)

    assert all(seconds >= 10 for seconds in found)
    assert verify(str(tmp_path / "step-00000001")).step == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="21-save in which nothing moves")])
def test_a_save_in_which_nothing_moves_until_the_time_out_is_named_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    ended = run_doomed(save_waited_for, ranks, SlowStorage(tmp_path, 15.0), 0.02, 3.0)

    errors = [end.error for end in ended]
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "SaveFailed"
    assert re.search(r"has hung for more than 0\.02 minutes: rank 0 in phase 'shards', rank 1 in", errors[0][1])


class HangsWhileItStages(LocalStorage):
    """Hangs once, before the first file is written."""

    def __init__(self, root: Path, free: threading.Event) -> None:
        super().__init__(root)
        self._free = free

    def make(self, path: str) -> None:
        self._free.wait(60)
        super().make(path)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_was_given_up_is_never_published(tmp_path: Path, background: bool) -> None:
    """Without a copy its tensors would be of a later step by then, under the name and the hashes of the earlier one."""
    free, model = threading.Event(), torch.nn.Linear(2, 2)
    storage = HangsWhileItStages(tmp_path, free)
    session = Session(storage, RankGroup(), "run", Retention(), background=background)
    session.wait_for_all = session.abandon

    session.save(take(model), 1, wait=True)
    saving = next(thread for thread in threading.enumerate() if thread.name == THREAD)
    with torch.no_grad():
        model.weight.fill_(2.0)
    free.set()
    saving.join()

    assert list(tmp_path.iterdir()) == []
