"""All ranks refuse to go on while a save is in flight, which is slow on one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.parallel.mesh import World
from tests.crash.runs import SlowChannel, saved_steps, values_of
from tests.failures.lab import doomed
from tests.training.cases import run


def refused(world: World, place: str, seconds: float) -> None:
    """Run until the observer raises; only rank 0 has work in the phase that is slow."""
    channel: Any = SlowChannel(world.failure, "retention", seconds if world.rank == 0 else 0.0)
    checkpoint = {"every_steps": 2, "background": True}
    values = values_of(Path(place), steps=6, observers=["stops.py:refuse"], checkpoint=checkpoint)
    with world.failure.guard(exit_seconds=0.3):
        run(replace(world, failure=channel), values, place)


@pytest.mark.slow
def test_no_rank_is_ended_while_the_save_before_a_refusal_is_slow(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text("def refuse(event):\n    if event.step == 3: raise ValueError('no')\n")

    told = doomed(refused, str(tmp_path), 4.0, seconds=60)

    assert [kind for kind, _ in told] == ["ObserverFailed"] * 2
    assert saved_steps(tmp_path) == [2, 3]
