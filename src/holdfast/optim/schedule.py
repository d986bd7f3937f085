"""What changes with a run's steps by plan: learning rates, and which parameters are trained.

Rates are pure functions of the step: nothing to save, nothing to restore wrongly.

Parameters that are frozen at first are out of the optimizer until their step, and in its groups from then on. They get
their group, with its rate and decay, when the optimizer is built, and are taken out of it again. Their state begins
with their first update, as that of any parameter does, with a count of steps of its own, and their averages begin at
their weights. Which of them are trained follows from the steps done alone, so it is the same after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.config.sections.optim import (
    CosineRestartsSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    PolynomialSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)
from holdfast.models.setup.freezing import Stage
from holdfast.optim.averages import Averages
from holdfast.optim.groups import PEAK, REST, STEM


def learning_rate_factor(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """Return the factor of the peak rate for an update.

    Args:
        schedule: Its shape.
        step: Updates done before this one.
        total_steps: Updates of the whole run; None only where the schedule does not need it (`needs_last_step`).

    Warm-up gives (step + 1) / warmup_steps, so the first update is not wasted. Decay runs from the end of warm-up to
    the last update, which has exactly final_ratio; a run of one update makes it at the peak.
    """
    warmup = schedule.warmup_steps or math.ceil(schedule.warmup_ratio * (total_steps or 0))
    if step < warmup:
        return (step + 1) / warmup
    if isinstance(schedule, InverseSqrtSchedule):
        timescale = schedule.timescale or warmup
        return math.sqrt(timescale / (timescale + step - warmup))
    if total_steps is None:
        return 1.0
    return _after_warmup(schedule, step, warmup, total_steps)


def _after_warmup(schedule: Schedule, step: int, warmup: int, total_steps: int) -> float:
    last = total_steps - 1
    match schedule:
        case LinearSchedule(final_ratio=final):
            return 1.0 + (final - 1.0) * _progress(step, warmup, last)
        case PolynomialSchedule(final_ratio=final, power=power):
            return final + (1.0 - final) * math.pow(1.0 - _progress(step, warmup, last), power)
        case CosineSchedule(final_ratio=final):
            return _half_cosine(final, _progress(step, warmup, last))
        case CosineRestartsSchedule(final_ratio=final, cycles=cycles):
            return _half_cosine(final, _progress_of_cycle(step, warmup, last, cycles))
        case WarmupStableDecaySchedule(final_ratio=final, decay_ratio=decay) if decay > 0:
            start = max(warmup, total_steps - math.ceil(decay * total_steps) - 1)
            return 1.0 + (final - 1.0) * _progress(step, start, last)
        case _:
            return 1.0


def _half_cosine(final: float, progress: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _progress_of_cycle(step: int, start: int, last: int, cycles: int) -> float:
    if not start <= step < last:
        return _progress(step, start, last)
    # In whole numbers: 22 * (15 / 22) is a little less than 15 in floating point, a cycle's end in place of a start.
    return (step - start) * cycles % (last - start) / (last - start)


def _progress(step: int, start: int, last: int) -> float:
    if last <= start:
        return 1.0 if 0 < last <= step else 0.0  # the only update of a run is made at the peak
    return min(1.0, max(0.0, (step - start) / (last - start)))


@dataclass
class Unfreezing:
    """What a run trains at which step.

    Args:
        stages: By step; none where all that is ever trained is trained from the start.
        optimizer: Built over everything that is ever trained.
        parameters: Sharded, by canonical name.
        averages: Of all that is ever trained, if the run keeps some.
    """

    stages: Sequence[Stage]
    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    averages: Averages | None = None
    _groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = field(init=False)

    def __post_init__(self) -> None:
        self._groups = [(group, list(group["params"])) for group in self.optimizer.param_groups]
        if self.stages:
            self.set_step(0)

    def after(self, step: int) -> list[int]:
        """Return the steps, after one, at whose end something is unfrozen."""
        return sorted({stage.at_step for stage in self.stages if stage.at_step > step})

    @property
    def names(self) -> frozenset[str]:
        """The names of all parameters that are frozen at first."""
        return frozenset(name for stage in self.stages for name in stage.names)

    def changing(self, step: int) -> list[Stage]:
        """Return the stages that are frozen and are not after so many steps, or the other way round."""
        return [
            stage for stage in self.stages if self.parameters[stage.names[0]].requires_grad != (step >= stage.at_step)
        ]

    def set_step(self, step: int) -> None:
        """Set `requires_grad` and the groups as they are after so many steps.

        No unit of the model may be gathered: what is gathered keeps the flags it was gathered with.
        """
        for stage in self.changing(step):
            for name in stage.names:
                parameter = self.parameters[name]
                parameter.requires_grad_(step >= stage.at_step)
                if self.averages is not None and not parameter.requires_grad:
                    self.averages.tensors.pop(name, None)
                elif self.averages is not None:
                    self.averages.begin({name: parameter})
        for group, members in self._groups:
            group["params"] = [parameter for parameter in members if parameter.requires_grad]
        self.optimizer.param_groups[:] = [group for group, _ in self._groups if group["params"]]

    @contextmanager
    def as_after(self, step: int, current_step: int) -> Iterator[None]:
        """Set the trained parameters within the block as after a later step; nothing is computed meanwhile."""
        self.set_step(step)
        try:
            yield
        finally:
            self.set_step(current_step)


def set_learning_rates(optimizer: Optimizer, factor: float) -> dict[str, float]:
    """Give every group its own peak times the schedule's factor; return the rate by stem, without the rest's."""
    rates = {}
    for group in optimizer.param_groups:
        rate = group[PEAK] * factor
        if isinstance(group["lr"], Tensor):  # torchao's own optimizers accept nothing else
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if group[STEM] != REST:
            rates[group[STEM]] = rate
    return rates
