"""Wall time by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up seconds per phase between two readings.

    On a GPU the work of a phase may still be queued when it ends; the phases of a whole step add up all the same, since
    each step waits once for its numbers.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block towards a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Return timing/<phase> and step_time in seconds since the last reading, and start again."""
        now = time.perf_counter()
        result = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        result["step_time"] = now - self._start
        self._seconds = {}
        self._start = now
        return result
