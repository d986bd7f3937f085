"""Learning rates by hand."""

from __future__ import annotations

import math

import pytest

from holdfast.config.sections.optim import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    WarmupStableDecaySchedule,
)
from holdfast.optim.schedule import learning_rate_factor


def factors(schedule: object, total: int | None) -> list[float]:
    return [learning_rate_factor(schedule, step, total) for step in range(total or 6)]  # type: ignore[arg-type]


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


@pytest.mark.parametrize("kind", [ConstantSchedule, LinearSchedule, CosineSchedule, WarmupStableDecaySchedule])
def test_the_only_step_of_a_run_is_made_at_full_rate(kind: type) -> None:
    assert factors(kind(), 1) == [1.0]
    assert factors(LinearSchedule(), 2) == [1.0, 0.0]


def test_a_decay_of_no_length_is_none() -> None:
    assert factors(WarmupStableDecaySchedule(decay_ratio=0.0), 5) == [1.0] * 5
