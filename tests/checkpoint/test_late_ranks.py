"""A rank that does not come to a call of the library is named with its phase, in the error that is promised."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.errors import HoldfastError
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build

SECONDS = 3.0
LATE_SECONDS = 10.0


def save_with_a_late_rank(world: World, run: str) -> tuple[str, str, float]:
    """Save, let rank 1 come too late to the second save, save again; return the second's error and its time."""
    toy = build(world)
    checkpoint.save(f"{run}/step-00000001", toy, timeout_minutes=SECONDS / 60)
    error: HoldfastError | None = None
    time.sleep(LATE_SECONDS if world.rank == 1 else 0)
    began = time.monotonic()
    try:
        checkpoint.save(f"{run}/step-00000002", toy, timeout_minutes=SECONDS / 60)
    except HoldfastError as caught:
        error = caught
    took = time.monotonic() - began
    time.sleep(LATE_SECONDS if world.rank == 0 else 0)
    checkpoint.save(f"{run}/step-00000003", toy, timeout_minutes=1.0)
    checkpoint.save(f"{run}/step-00000004", toy, timeout_minutes=SECONDS * 2 / 60)
    return type(error).__name__, str(error), took


@pytest.mark.slow
def test_a_rank_that_is_late_to_a_save_is_named_and_the_next_save_is_whole(pools: Any, tmp_path: Path) -> None:
    first, second = pools(2).run(save_with_a_late_rank, str(tmp_path))

    assert first[0] == second[0] == "SaveFailed"
    waited = "rank 0 waited until its time was over in phase 'begin' of checkpoint.save: "
    assert first[1].startswith(f"{waited}rank 1 is in no call of holdfast.checkpoint (")
    assert first[2] < SECONDS + 8
    assert "rank 1 " in second[1]
    assert "in phase 'begin' of checkpoint.save: rank 0 is in no call of holdfast.checkpoint (" in second[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{number}" for number in (1, 3, 4)]
    assert [checkpoint.verify(str(path)).step for path in sorted(tmp_path.iterdir())] == [1, 3, 4]


def load_with_a_late_rank(world: World, path: str) -> None:
    toy = build(world)
    checkpoint.save(path, toy, timeout_minutes=SECONDS / 60)
    time.sleep(LATE_SECONDS if world.rank == 1 else 0)
    with contextlib.ExitStack() as stack:
        stack.callback(time.sleep, LATE_SECONDS if world.rank == 0 else 0)
        checkpoint.load(path, toy, timeout_minutes=SECONDS / 60)


@pytest.mark.slow
def test_a_rank_that_is_late_to_a_load_is_named(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(load_with_a_late_rank, str(tmp_path / "step-00000001"))

    assert [name for name, _ in errors] == ["RankFailed"] * 2
    assert "of checkpoint.load: rank 1 is in no call of holdfast.checkpoint (" in errors[0][1]
    assert "of checkpoint.load: rank 0 is in no call of holdfast.checkpoint (" in errors[1][1]
