"""What each phase of a run takes of memory is recorded as a fact."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.training.directory import MEMORY, events
from holdfast.training.phases import PhasePeaks
from tests.training.cases import run, tree

MIB = 2**20


def test_a_phase_and_the_one_around_it_have_what_was_taken_within() -> None:
    peaks = PhasePeaks()

    with peaks.phase("before"):
        pass
    with peaks.phase("outer"):
        with peaks.phase("inner"):
            taken = np.ones(2**29, np.uint8)  # more than this process has had
            del taken
        with peaks.phase("later"):
            pass

    measured = peaks.news()
    assert measured["inner"] - measured["before"] > 400 * MIB
    assert measured["outer"] >= measured["inner"]
    assert measured["inner"] - measured["later"] > 400 * MIB


def test_peaks_are_told_again_when_one_has_grown() -> None:
    peaks = PhasePeaks()
    with peaks.phase("a"):
        pass

    assert set(peaks.news()) == {"a"}
    assert peaks.news() == {}
    with peaks.phase("b"):
        pass
    assert set(peaks.news()) == {"a", "b"}


def test_a_phase_costs_microseconds() -> None:
    peaks = PhasePeaks()
    start = time.process_time()

    for _ in range(1000):
        with peaks.phase("a"):
            pass

    assert (time.process_time() - start) / 1000 < 200e-6  # a tenth of a percent of a step of six phases and a second


def test_a_run_writes_down_what_its_phases_took(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, tree(str(tmp_path)))

    records = list(events(tmp_path / "r", MEMORY))
    assert records[0]["step"] == 1
    assert {"load", "data", "forward_backward", "optimizer"} <= set(records[0]["peaks"])
    assert records[-1]["device"] == "cpu"
    assert all(50 * MIB < peak < 50 * 2**30 for peak in records[-1]["peaks"].values())
