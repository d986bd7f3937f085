"""Learning rates by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import (
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_polynomial_decay_schedule_with_warmup,
)

from holdfast.config.sections.optim import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    PolynomialSchedule,
    WarmupStableDecaySchedule,
)
from holdfast.optim.schedule import learning_rate_factor


def factors(schedule: object, total: int | None) -> list[float]:
    return [learning_rate_factor(schedule, step, total) for step in range(total or 6)]  # type: ignore[arg-type]


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def upstream(scheduler: LambdaLR, steps: int, warmup: int) -> list[float]:
    """Return transformers' factors as we count: its warm-up begins at 0, where ours begins at 1 / warmup_steps."""
    (factor,) = scheduler.lr_lambdas
    return [factor(step + 1 if step < warmup else step) for step in range(steps)]


def test_warm_up_rises_linearly_and_reaches_the_peak_on_its_last_step() -> None:
    assert factors(ConstantSchedule(warmup_steps=4), None) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_exactly_at_its_final_ratio() -> None:
    found = factors(LinearSchedule(warmup_steps=2, final_ratio=0.1), 7)

    assert found == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_cosine_passes_the_middle_at_half_height() -> None:
    found = factors(CosineSchedule(final_ratio=0.2), 9)

    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.6)
    assert found[8] == pytest.approx(0.2)
    assert found[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_warm_up_stable_decay_holds_and_then_falls() -> None:
    found = factors(WarmupStableDecaySchedule(decay_ratio=0.4, final_ratio=0.0), 10)

    assert found[:6] == [1.0] * 6
    assert found[5:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_warm_up_ratio_counts_steps_of_the_whole_run() -> None:
    found = factors(LinearSchedule(warmup_ratio=0.3, final_ratio=1.0), 10)

    assert found[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


KINDS = [
    ConstantSchedule,
    LinearSchedule,
    CosineSchedule,
    CosineRestartsSchedule,
    PolynomialSchedule,
    WarmupStableDecaySchedule,
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_only_step_of_a_run_is_made_at_full_rate(kind: type) -> None:
    assert factors(kind(), 1) == [1.0]
    assert factors(LinearSchedule(), 2) == [1.0, 0.0]


def test_a_decay_of_no_length_is_none() -> None:
    assert factors(WarmupStableDecaySchedule(decay_ratio=0.0), 5) == [1.0] * 5


@pytest.mark.parametrize(("warmup", "cycles"), [(0, 1), (0, 3), (7, 2), (10, 5)])
def test_cosine_with_restarts_is_transformers_with_the_end_at_the_last_update(warmup: int, cycles: int) -> None:
    ours = factors(CosineRestartsSchedule(warmup_steps=warmup, cycles=cycles), 61)

    theirs = get_cosine_with_hard_restarts_schedule_with_warmup(an_optimizer(), warmup, 60, num_cycles=cycles)
    assert ours == pytest.approx(upstream(theirs, 61, warmup), abs=1e-12)


def test_every_cycle_begins_at_the_peak_and_only_the_last_ends_at_the_final_ratio() -> None:
    ours = factors(CosineRestartsSchedule(cycles=22, final_ratio=0.25), 45)

    assert ours == pytest.approx([1.0, 0.625] * 22 + [0.25])


def test_one_cycle_is_a_cosine() -> None:
    assert factors(CosineRestartsSchedule(cycles=1, final_ratio=0.1, warmup_ratio=0.1), 40) == factors(
        CosineSchedule(final_ratio=0.1, warmup_ratio=0.1), 40
    )


@pytest.mark.parametrize(("warmup", "power", "final"), [(0, 1.0, 0.01), (0, 2.0, 0.1), (9, 0.5, 0.0), (9, 3.0, 0.3)])
def test_polynomial_is_transformers_with_the_end_at_the_last_update(warmup: int, power: float, final: float) -> None:
    ours = factors(PolynomialSchedule(warmup_steps=warmup, power=power, final_ratio=final), 61)

    theirs = get_polynomial_decay_schedule_with_warmup(an_optimizer(), warmup, 60, lr_end=final, power=power)
    assert ours == pytest.approx(upstream(theirs, 61, warmup), abs=1e-12)
    assert ours[60] == final


@pytest.mark.parametrize(("warmup", "timescale"), [(10, None), (10, 40), (0, 25), (1, None)])
def test_the_inverse_square_root_is_transformers(warmup: int, timescale: int | None) -> None:
    schedule = InverseSqrtSchedule(warmup_steps=warmup, timescale=timescale)
    ours = factors(schedule, 200)

    theirs = get_inverse_sqrt_schedule(an_optimizer(), warmup, timescale=timescale)
    assert ours == pytest.approx(upstream(theirs, 200, warmup), abs=1e-12)
    assert ours == [learning_rate_factor(schedule, step, None) for step in range(200)]


def test_the_inverse_square_root_follows_a_warm_up_that_is_a_share_of_the_run() -> None:
    ours = factors(InverseSqrtSchedule(warmup_ratio=0.1), 50)

    assert ours[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert ours[20] == 0.5  # 3 x timescale steps after warm-up
    assert factors(InverseSqrtSchedule(warmup_ratio=0.1), 1) == [1.0]
