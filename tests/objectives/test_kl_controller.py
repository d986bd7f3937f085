"""The KL controller stays positive, however many completions a step has."""

from __future__ import annotations

import pytest

from holdfast.config.sections.policy import KLConfig
from holdfast.objectives.regularisers import next_kl_coefficient


@pytest.mark.parametrize(("measured", "expected"), [(0.0, 0.025), (10.0, 0.1)])
def test_many_completions_move_the_coefficient_by_a_factor_of_two_at_most(measured: float, expected: float) -> None:
    config = KLConfig(coefficient=0.05, target=0.1, horizon=1000)

    assert next_kl_coefficient(config, 0.05, measured, 8192) == pytest.approx(expected)
