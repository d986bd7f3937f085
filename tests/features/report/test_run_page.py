"""The page at a run's end leaves the process's alarm as it was."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from holdfast.features.report.run_page import _giving_up_after


@pytest.fixture
def rung() -> Iterator[list[int]]:
    """Return the signals that came; pytest's own alarm is put back."""
    came: list[int] = []
    due, began = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    handler = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    if due:
        signal.setitimer(signal.ITIMER_REAL, max(due - (time.monotonic() - began), 1e-3))


def test_an_alarm_of_the_process_rings_when_it_was_due(rung: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 50)
    with _giving_up_after(5):
        assert 4 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5
    assert 49 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50

    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with _giving_up_after(5):
        time.sleep(0.05)
        assert rung == []
    time.sleep(0.05)
    assert rung == [signal.SIGALRM]


def test_a_process_without_an_alarm_has_none_afterwards(rung: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    with _giving_up_after(5):
        pass

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert rung == []
