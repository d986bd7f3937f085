"""A rank that hangs or is slow in a save: an error within the time-out, or patience below it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.snapshot import take
from holdfast.checkpoint.storage import LocalStorage
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, optimizer_of, step
from tests.crash.cases import look_after, session_of, train_and_save
from tests.crash.faulty import SlowStorage
from tests.crash.processes import DoomedRanks, acknowledged

TIMEOUT = 4.0


def stop_in_phase(world: World, directory: Path, phase: str, background: bool, when: Path) -> None:
    """Stop rank 1, as a hung file system does, in the save of step 3."""
    counted = 0

    def reached(name: str) -> None:
        nonlocal counted
        counted += name == phase
        if world.rank == 1 and counted == 3:
            when.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)

    session = session_of(LocalStorage(directory), world, seconds=TIMEOUT, background=background, reached=reached)
    train_and_save(world, session, directory)


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
    assert survivor.code == 0
    assert took < TIMEOUT + 10
    assert acknowledged(directory) == [1, 2]
    assert pools(2).run(look_after, [directory])[0][0]["chosen"] >= 2


def save_slowly(world: World, directory: Path) -> float:
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    session = session_of(SlowStorage(directory, 1.5 * world.rank), world, seconds=TIMEOUT * 3, background=False)
    session.save(take(toy, optimizer), 1)
    saved = session.collect()
    assert saved is not None
    return saved.manifest.seconds


@pytest.mark.parametrize("ranks", [pytest.param(2, id="22-slow rank")])
def test_a_rank_that_is_slow_within_the_time_out_is_waited_for(pools: Any, tmp_path: Path, ranks: int) -> None:
    seconds = pools(ranks).run(save_slowly, tmp_path)

    assert seconds[0] == seconds[1]
    assert seconds[0] >= 1.5
