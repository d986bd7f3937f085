"""Saves by steps, by passes over the data, by the clock, and by several of them together, in whole runs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.training.control import Timetable
from tests.crash.runs import saved_steps, values_of
from tests.training.cases import run


def due(steps: int, per_epoch: int, **keys: Any) -> list[int]:
    """Return the steps after which something is due."""
    table = Timetable(CheckpointConfig(**keys), 0.0)
    return [step for step in range(1, steps + 1) if table.due(step, step / per_epoch)]


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
