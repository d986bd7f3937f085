"""When something is due: after so many steps, at shares of a pass that floating point cannot write, by the clock."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.training.control import Timetable


def times(**given: Any) -> Any:
    return SimpleNamespace(**{"every_steps": None, "every_minutes": None, "every_epochs": None, **given})


def epoch_after(batches: int, per_epoch: int) -> float:
    """Return the epoch as a stream computes it."""
    whole, rest = divmod(batches, per_epoch)
    return whole + rest * 10 / (per_epoch * 10)


@pytest.mark.parametrize("per_epoch", [3, 7, 10, 49, 1000])
@pytest.mark.parametrize("every", ["0.1", "0.3", "0.07", "0.5", "1", "1.1", "2.5"])
def test_shares_of_a_pass_are_due_at_the_first_batch_that_reaches_them(every: str, per_epoch: int) -> None:
    timetable = Timetable(times(every_epochs=float(every)), 0.0)

    due = [batch for batch in range(1, 4 * per_epoch + 1) if timetable.due(batch, epoch_after(batch, per_epoch))]

    reached = [Fraction(batch, per_epoch) // Fraction(every) for batch in range(4 * per_epoch + 1)]
    assert due == [batch for batch in range(1, 4 * per_epoch + 1) if reached[batch] > reached[batch - 1]]


def test_a_run_that_goes_on_keeps_the_shares_of_a_pass() -> None:
    timetable = Timetable(times(every_epochs=0.1), 0.3)

    assert [timetable.due(step, step / 20) for step in (7, 8, 9, 10)] == [False, True, False, True]


def test_minutes_count_from_the_last_time_something_was_due() -> None:
    now = [100.0]
    timetable = Timetable(times(every_minutes=0.5, every_steps=4), 0.0, lambda: now[0])

    due = []
    for step in range(1, 10):
        now[0] += 10.0
        due.append(timetable.due(step, 0.0))

    assert due == [False, False, True, True, False, False, True, True, False]


def test_minutes_alone_are_due_when_they_have_passed() -> None:
    now = [0.0]
    timetable = Timetable(times(every_minutes=1.0), 0.0, lambda: now[0])

    due = []
    for seconds in (59.9, 60.0, 61.0, 119.9, 121.0, 180.9, 181.0):
        now[0] = seconds
        due.append(timetable.due(1, 0.0))

    assert due == [False, True, False, False, True, False, True]
