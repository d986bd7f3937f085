"""What each phase of a run takes of memory is recorded as a fact."""

from __future__ import annotations

import resource
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from holdfast.training.directory import MEMORY, events
from holdfast.training.phases import PhasePeaks
from tests.training.cases import run, tree

MIB = 2**20
ROOT = Path(__file__).parents[2]


def test_a_phase_and_the_one_around_it_have_what_was_taken_within() -> None:
    peaks = PhasePeaks()
    left = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - psutil.Process().memory_info().rss

    with peaks.phase("before"):
        pass
    with peaks.phase("outer"):
        with peaks.phase("inner"):
            taken = np.ones(left + 512 * MIB, np.uint8)  # more than this process has had
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


class Counter:
    """A device's counter of allocated bytes, with the two calls of `torch.cuda` that read and begin it."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)

    def max_memory_allocated(self) -> int:
        return self.most

    def reset_peak_memory_stats(self) -> None:
        self.most = self.now


def test_a_benchmark_tells_the_peak_of_all_phases_of_a_trainer_that_sets_the_counter_back() -> None:
    counter = Counter()
    counter.take(500)
    counter.take(-400)
    peak_from_here = runpy.run_path(str(ROOT / "benchmarks" / "measure.py"))["peak_from_here"]
    peak = peak_from_here(counter)

    for phase in (30, 200, 10):
        counter.reset_peak_memory_stats()
        counter.take(phase)
        counter.take(-phase)

    assert counter.max_memory_allocated() == 100 + 10
    assert peak() == 100 + 200
    assert (peak_from_here(counter)(), peak()) == (100, 300)
