"""The most memory that each phase of a run has had: a fact that `holdfast plan` and `doctor` compare with a plan.

On a GPU it is what torch has allocated there. A CPU has no such counter; there it is the process's resident memory, to
the byte where a phase is the process's largest so far, else as it is when the phase begins and ends.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

MEMORY = "memory"
"""The event in events.jsonl: `device`, and `peaks`, phase -> bytes on rank 0, the largest of all steps so far."""
LOAD = "load"
"""What comes before the first step: the model, its checks, the rehearsal."""
_GROWTH = 1.01
"""Peaks are told again when one has grown by so much."""


class PhasePeaks:
    """Bytes per phase; phases may lie in each other, and count towards those around them."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._around: list[int] = []
        """The peak so far of each phase that is going on, on a device."""
        self._largest = 0
        self._peaks: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    @property
    def largest(self) -> int:
        """The most that torch has allocated on the device so far, in a phase or not; 0 where no device is used."""
        self._largest = max(self._largest, _allocated())
        return self._largest

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        on_device, resident = _on_device(), _resident_peak()
        if on_device:
            self._begin()
        try:
            yield
        finally:
            now = _resident_peak()
            in_host = now if now > resident else int(self._process.memory_info().rss)
            self._note(name, self._end() if on_device else in_host)

    def note_load(self) -> None:
        """Take what was until now as the peak of `load`, before the first step of a start."""
        self._note(LOAD, self.largest if _on_device() else _resident_peak())

    def news(self) -> dict[str, int]:
        """Return all peaks if one has grown by more than a hundredth since they were returned, else nothing."""
        if all(peak <= _GROWTH * self._reported.get(name, 0) for name, peak in self._peaks.items()):
            return {}
        self._reported = dict(self._peaks)
        return dict(self._peaks)

    def _begin(self) -> None:
        """Let the device's counter begin anew, which until now counted for the phases around."""
        so_far = _allocated()
        self._largest = max(self._largest, so_far)
        self._around = [*(max(peak, so_far) for peak in self._around), 0]
        torch.cuda.reset_peak_memory_stats()

    def _end(self) -> int:
        peak = max(self._around.pop(), _allocated())
        self._largest = max(self._largest, peak)
        self._around = [max(each, peak) for each in self._around]
        return peak

    def _note(self, name: str, peak: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0), peak)


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch does not annotate it


def _allocated() -> int:
    """Return the most that torch has allocated on this rank's device since its counter began."""
    if not _on_device():
        return 0
    # torch.cuda.max_memory_allocated flattens and sorts some hundred numbers for this one.
    return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"])


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
