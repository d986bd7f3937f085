"""When something is due: by steps, by passes over the data, by the clock, and by several of them together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.checkpoint import CheckpointConfig
from holdfast.training.control import Timetable
from tests.crash.runs import saved_steps, values_of
from tests.training.cases import run


def due(steps: int, per_epoch: int, first: int = 0, **keys: Any) -> list[int]:
    """Return the steps after which something is due, of a start at `first`."""
    table = Timetable(CheckpointConfig(**keys), first / per_epoch)
    return [step for step in range(first + 1, steps + 1) if table.due(step, step / per_epoch)]


@pytest.mark.parametrize(
    ("keys", "per_epoch", "expected"),
    [
        ({"every_epochs": 0.5}, 8, [4, 8, 12, 16, 20]),
        ({"every_epochs": 1.0}, 8, [8, 16]),
        ({"every_epochs": 2.0}, 8, [16]),
        ({"every_epochs": 0.5}, 5, [3, 5, 8, 10, 13, 15, 18, 20]),
        ({"every_epochs": 0.25}, 2, list(range(1, 21))),
        ({"every_steps": 7}, 8, [7, 14]),
        ({"every_steps": 7, "every_epochs": 1.0}, 8, [7, 8, 14, 16]),
        ({"every_minutes": 60.0}, 8, []),
        ({}, 8, []),
    ],
)
def test_steps_and_passes_are_counted_from_the_start_of_the_run(
    keys: dict[str, float], per_epoch: int, expected: list[int]
) -> None:
    assert due(20, per_epoch, **keys) == expected


@pytest.mark.parametrize("first", [1, 3, 4, 5, 11])
def test_a_resume_keeps_to_the_steps_of_the_straight_run(first: int) -> None:
    straight = due(20, 8, every_epochs=0.5)

    assert due(20, 8, first, every_epochs=0.5) == [step for step in straight if step > first]


def test_minutes_are_counted_from_the_last_time_whatever_made_it_due() -> None:
    table = Timetable(CheckpointConfig(every_minutes=0.4 / 60, every_steps=3), 0.0)

    found = [table.due(1, 0.0)]
    time.sleep(0.41)
    found += [table.due(2, 0.0), table.due(3, 0.0)]
    time.sleep(0.2)
    found += [table.due(4, 0.0)]
    time.sleep(0.25)
    found += [table.due(5, 0.0)]

    assert found == [False, True, True, False, True]


def test_a_run_saves_every_half_pass_over_its_rows(pools: Any, tmp_path: Path) -> None:
    rows = {"synthetic": {"task": "sort", "rows": 128}}
    values = values_of(tmp_path, steps=13, data=rows, checkpoint={"every_steps": None, "every_epochs": 0.5})
    values["checkpoint"]["at_end"] = False

    pools(1).run(run, values)

    assert saved_steps(tmp_path) == [4, 8, 12]


def test_a_run_saves_every_few_milliseconds_after_each_step_and_every_few_hours_never(
    pools: Any, tmp_path: Path
) -> None:
    for name, minutes, expected in (("often", 1e-6, [1, 2, 3]), ("seldom", 600.0, [])):
        checkpoint = {"every_steps": None, "every_minutes": minutes, "at_end": False}
        pools(1).run(run, values_of(tmp_path / name, steps=3, checkpoint=checkpoint))

        assert saved_steps(tmp_path / name) == expected
