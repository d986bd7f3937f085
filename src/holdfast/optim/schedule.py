"""Learning rates by step: pure functions of it, so there is nothing to save and nothing to restore wrongly."""

from __future__ import annotations

import math

from torch import Tensor
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
