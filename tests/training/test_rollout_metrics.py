"""What a step says of its completions and updates in numbers."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.metrics import length_metrics, mismatch_spread, of_several_updates
from holdfast.types import Finish


def lengths(*completions: tuple[int, Finish]) -> dict[str, float]:
    facts = tuple(CompletionSummary(1.0, {}, length, length + 3, finish, None, None) for length, finish in completions)
    found = length_metrics([GroupFact(0, 0, facts)])
    return {name.removeprefix("completions/"): value for name, value in found.items()}


def test_lengths_of_completions_that_ended_are_told_apart_from_all() -> None:
    assert lengths((4, Finish.STOP), (9, Finish.STOP), (2, Finish.STOP), (16, Finish.LENGTH)) == {
        "mean_length": 7.75,
        "min_length": 2.0,
        "max_length": 16.0,
        "clipped_ratio": 0.25,
        "mean_terminated_length": 5.0,
        "min_terminated_length": 2.0,
        "max_terminated_length": 9.0,
    }
    cut = lengths((16, Finish.LENGTH))
    assert [cut[f"{which}_terminated_length"] for which in ("mean", "min", "max")] == [0.0, 0.0, 0.0]


def test_the_least_and_the_most_clipped_update_of_a_step_are_told() -> None:
    """Three updates, the last without a trained token; means are over tokens: 12 of 40 and 10 of 40."""
    sums = [
        {"clip_ratio/low_mean": (2.0, 10.0), "clip_ratio/high_mean": (1.0, 10.0)},
        {"clip_ratio/low_mean": (10.0, 30.0), "clip_ratio/high_mean": (9.0, 30.0)},
        {"clip_ratio/low_mean": (0.0, 0.0), "clip_ratio/high_mean": (0.0, 0.0)},
    ]

    assert of_several_updates([{}, {}, {}], sums) == {
        "clip_ratio/low_mean": 0.3,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/low_min": 0.2,
        "clip_ratio/high_max": 0.3,
    }
    assert of_several_updates([{"loss": 1.0}], [{"loss": (3.0, 2.0)}]) == {"loss": 1.5}


def test_quantiles_and_the_largest_difference_are_those_of_all_tokens() -> None:
    log_ratios = np.random.default_rng(3).normal(0, 0.1, 1001).astype(np.float32)
    log_ratios[17] = -2.5

    metrics = mismatch_spread(log_ratios)

    ordered = np.sort(np.exp(log_ratios.astype(np.float64)))
    assert metrics["sampling/sampling_logp_difference/max"] == 2.5
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(np.exp(-2.5))
    assert metrics["sampling/importance_sampling_ratio/median"] == pytest.approx(ordered[500])
    assert metrics["sampling/importance_sampling_ratio/p99"] == pytest.approx(ordered[990])
    assert mismatch_spread(np.zeros(0, np.float32)) == {}
