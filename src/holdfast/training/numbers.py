"""The numbers of steps, which a device may still compute while the next step begins, and the measurements of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

import psutil
import torch

from holdfast.metrics.health import SLOWEST, SLOWEST_RATIO, STRAGGLER_STEPS
from holdfast.metrics.throughput import peak_flops
from holdfast.parallel.collectives import RankGroup
from holdfast.training.run import Logbook, Training
from holdfast.training.step import Update
from holdfast.types import Batch

# The main thread's nanoseconds on a CPU and in the run queue. Wall-clock time would not tell the slow rank from those
# that wait for it in collectives.
_SCHEDULE = Path("/proc/self/schedstat")


@dataclass
class StepNumbers:
    """The numbers of one step."""

    step: int
    line: dict[str, float]
    """Numbers that the host has."""
    update: Update | None
    """Has the other numbers; None once they are read."""
    batches: list[Batch]
    """Batches of the step, to be recorded if it is a spike."""

    def read(self) -> dict[str, float]:
        """Return all numbers.

        Raises:
            RunStopped: As `Update.read`.
        """
        if self.update is not None:
            self.line = {**self.update.read().metrics, **self.line}
            self.update = None
        return self.line


@dataclass
class NumbersOfSteps:
    """The numbers of the last steps: read when something waits for them, and reported in their order.

    Args:
        log: Takes the batches of the step that is reported.
        report: Takes a line of numbers and its step.
    """

    log: Logbook
    report: Callable[[dict[str, float], int], None]
    line: dict[str, float] = field(default_factory=dict)
    """Metrics of the step that was read last, its evaluation included."""
    _pending: list[StepNumbers] = field(default_factory=list)
    """Steps that are not reported; more than one only while one is being read."""

    def add(self, step: int, result: dict[str, float] | Update, epoch: float) -> None:
        """Take the result of a step, and report the step before it."""
        update = result if isinstance(result, Update) else None
        known = result.known if isinstance(result, Update) else result
        self._pending.append(StepNumbers(step, {**known, "epoch": epoch}, update, list(self.log.batches)))
        self.log.batches.clear()
        self.report_read(keep=1)
        if update is None:
            self.read()

    @property
    def last(self) -> dict[str, float]:
        """Numbers of the last step that the host has; more can be added until they are reported."""
        return self._pending[-1].line

    @property
    def waits(self) -> bool:
        """Whether the numbers of the last step are still to be read."""
        return self._pending[-1].update is not None

    def read(self) -> dict[str, float]:
        """Return the numbers of the last step; a step whose numbers end the run is not reported.

        Raises:
            RunStopped: As `Update.read`.
        """
        numbers = self._pending.pop()
        self.line = numbers.read()
        self._pending.append(numbers)
        return self.line

    def report_read(self, *, keep: int = 0) -> None:
        """Read and report the steps that are pending, all but the last `keep`."""
        while len(self._pending) > keep:
            numbers = self._pending.pop(0)
            self.line = numbers.read()
            self.log.batches[:] = numbers.batches
            self.report(self.line, numbers.step)


def measurements(training: Training, line: dict[str, float]) -> dict[str, float]:
    """Return times, throughput and memory since the last step."""
    run, cost = training.run, training.model.cost
    times = run.log.clock.read()
    tokens = line.get("data/tokens", 0.0)
    seconds = max(times["step_time"], 1e-9)
    measured = {**times, "throughput/tokens_per_second": tokens / seconds}
    flops_per_second = run.config.metrics.peak_flops
    if flops_per_second is None and run.world.device.type == "cuda":
        flops_per_second = peak_flops(torch.cuda.get_device_name(run.world.device))
    if flops_per_second is not None and tokens and cost is not None:
        flops = cost.flops(tokens, line.get("data/mean_length", 0.0))
        measured["throughput/mfu"] = flops / seconds / (flops_per_second * run.world.size)
    if run.world.device.type == "cuda":
        measured["memory/peak_gib"] = run.log.peaks.largest / 2**30
    else:
        measured["memory/resident_gib"] = psutil.Process().memory_info().rss / 2**30
    return measured


class Stragglers:
    """Detects the rank that the others wait for: every few steps, all ranks compare how long each of them worked.

    Work is the time in which a rank's main thread was running or runnable. While it sleeps, it waits for other ranks or
    for a disk. On a GPU the thread spins while the device computes, so nothing is compared there. Every rank calls
    `look` after each step.

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
