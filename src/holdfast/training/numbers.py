"""The numbers of a step: those of its update, which may still be on the device, and those that the host measures."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from holdfast.metrics.throughput import peak_flops
from holdfast.training.run import Run, Training
from holdfast.training.step import StartedUpdate
from holdfast.types import Batch


@dataclass
class StepNumbers:
    """The numbers of a step, which the device may still be computing."""

    step: int
    line: dict[str, float]
    """Those that the host has."""
    update: StartedUpdate | None
    """Has the others, until they are read."""
    batches: list[Batch]
    """Of the step, to be recorded if it is a spike."""

    def read(self) -> dict[str, float]:
        """Return all numbers.

        Raises:
            RunStopped: As `StartedUpdate.read`.
        """
        if self.update is not None:
            self.line = self.update.read().metrics | self.line
            self.update = None
        return self.line


def measurements(training: Training, line: dict[str, float]) -> dict[str, float]:
    """Return times, throughput and memory since the last step."""
    times = training.run.log.clock.read()
    tokens = line.get("data/tokens", 0.0)
    seconds = max(times["step_time"], 1e-9)
    measured = {**times, "throughput/tokens_per_second": tokens / seconds}
    cost, flops_per_second = training.model.cost, _peak_flops(training.run)
    if flops_per_second is not None and tokens and cost is not None:
        flops = cost.flops(tokens, line.get("data/mean_length", 0.0))
        measured["throughput/mfu"] = flops / seconds / (flops_per_second * training.run.world.size)
    if training.run.world.device.type == "cuda":
        measured["memory/peak_gib"] = training.run.log.peaks.largest / 2**30
    else:
        measured["memory/resident_gib"] = psutil.Process().memory_info().rss / 2**30
    return measured


def _peak_flops(run: Run) -> float | None:
    """Return what one device can do."""
    if run.config.metrics.peak_flops is not None or run.world.device.type != "cuda":
        return run.config.metrics.peak_flops
    return peak_flops(torch.cuda.get_device_name(run.world.device))
