"""Detect the rank that the others wait for: every few steps, all ranks compare how long each of them worked.

Work is the time in which a rank's main thread was running or runnable. While it sleeps, it waits for other ranks or for
a disk. On a GPU the thread spins while the device computes, so nothing is compared there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

from holdfast.metrics.health import SLOWEST, SLOWEST_RATIO, STRAGGLER_STEPS
from holdfast.parallel.collectives import RankGroup

# The main thread's nanoseconds on a CPU and in the run queue. Wall-clock time would not tell the slow rank from those
# that wait for it in collectives.
_SCHEDULE = Path("/proc/self/schedstat")


class Stragglers:
    """Compares the ranks' work; every rank calls `look` after each step.

    Args:
        ranks: The ranks.
        device: Kind of their devices.
    """

    def __init__(self, ranks: RankGroup, device: str) -> None:
        self._ranks = ranks
        self._compares = ranks.size > 1 and device == "cpu"
        self._before: float | None = None

    def look(self, step: int) -> dict[str, float]:
        """Return the slowest rank and its work over that of the one in the middle, at steps of a comparison."""
        if not self._compares or step % STRAGGLER_STEPS:
            return {}
        seconds = seconds_at_work()
        worked = None if seconds is None or self._before is None else seconds - self._before
        self._before = seconds
        return slowest(self._ranks.gather(worked))


def slowest(worked: Sequence[float | None]) -> dict[str, float]:
    """Return what `Stragglers.look` does, of each rank's seconds; nothing where one does not know them."""
    seconds = [seconds for seconds in worked if seconds is not None]
    middle = median_low(seconds) if seconds else 0.0
    if len(seconds) < len(worked) or middle <= 0:
        return {}
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return {SLOWEST: float(rank), SLOWEST_RATIO: seconds[rank] / middle}


def seconds_at_work() -> float | None:
    """Return for how long the main thread ran or waited for a processor; None where the system does not say."""
    try:
        running, waiting, *_ = _SCHEDULE.read_text().split()
        return (int(running) + int(waiting)) / 1e9
    except (OSError, ValueError):
        return None
