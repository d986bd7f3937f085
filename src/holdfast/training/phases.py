"""Measure time and peak memory of the phases of a step."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch


class PhaseClock:
    """Divides the time between two readings among phases, so that the phases add up to the total.

    The time of a phase within another one is subtracted from the outer one. Time outside of all phases is
    `timing/other`. On a GPU, the work of a phase may still be queued when the phase ends; over several steps the sum
    is nevertheless right, since each step waits once for the device, for its own work or for that of the step before.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phases = ["other"]
        """Those that go on, the innermost last."""
        self._start = self._counted = time.perf_counter()

    def _count(self) -> float:
        """Give the time since the last change to the innermost phase; return the present time."""
        timestamp, phase = time.perf_counter(), self._phases[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + timestamp - self._counted
        self._counted = timestamp
        return timestamp

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block towards a phase."""
        self._count()
        self._phases.append(name)
        try:
            yield
        finally:
            self._count()
            self._phases.pop()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the time of the block, and its phases, out of the next reading."""
        began, seconds = self._count(), dict(self._seconds)
        try:
            yield
        finally:
            self._start += self._count() - began
            self._seconds = seconds

    def read(self) -> dict[str, float]:
        """Return timing/<phase> and step_time in seconds since the last reading, and start again."""
        timestamp = self._count()
        result = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        result["step_time"] = timestamp - self._start
        self._seconds = {}
        self._start = timestamp
        return result


class PhasePeaks:
    """The peak memory of each phase over all steps so far; the peak of a phase also counts for those around it.

    On a GPU it is the memory that torch has allocated. On a CPU it is the resident memory of the process: exact if the
    phase sets a new maximum of the process, otherwise the larger of the values at the start and the end of the phase.
    """

    def __init__(self) -> None:
        self.at_start = int(psutil.Process().memory_info().rss)  # Python and libraries: on a CPU, peaks count them too
        self._around: list[int] = []  # the peak so far of each phase that is going on, on a device
        self._largest = 0
        self._peaks: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    @property
    def largest(self) -> int:
        """The most that torch has allocated on the device so far, in a phase or not; 0 where no device is used."""
        self._largest = max(self._largest, _allocated())
        return self._largest

    def outside(self, *names: str) -> int:
        """Return the largest peak of all phases but some."""
        return max((peak for name, peak in self._peaks.items() if name not in names), default=0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        on_device, resident = _on_device(), _resident_peak()
        if on_device:  # the device's counter begins anew, which until now counted for the phases around
            self._around = [*(max(peak, _allocated()) for peak in self._around), 0]
            self._largest = max(self._largest, _allocated())
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            if on_device:
                peak = max(self._around.pop(), _allocated())
                self._around = [max(outer_peak, peak) for outer_peak in self._around]
            elif (peak := _resident_peak()) <= resident:
                peak = int(psutil.Process().memory_info().rss)
            self._note(name, peak)

    def note_load(self) -> None:
        """Record the peak so far as that of loading: the model, its checks and the rehearsal."""
        self._note("load", self.largest if _on_device() else _resident_peak())

    def news(self) -> dict[str, int]:
        """Return all peaks if one has grown by more than a hundredth since they were returned, else nothing."""
        if all(peak <= 1.01 * self._reported.get(name, 0) for name, peak in self._peaks.items()):
            return {}
        self._reported = dict(self._peaks)
        return dict(self._peaks)

    def _note(self, name: str, peak: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), peak)


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch does not annotate it


def _allocated() -> int:
    """Return the most that torch has allocated on this rank's device since its counter began; 0 without one."""
    if not _on_device():
        return 0
    # torch.cuda.max_memory_allocated flattens and sorts some hundred numbers for this one.
    return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"])


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
