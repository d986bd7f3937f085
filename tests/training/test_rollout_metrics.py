"""What a step says of its completions and updates in numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.metrics import length_metrics, mismatch_spread, of_several_updates
from holdfast.training.step import UpdateNumbers
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

    assert of_several_updates([UpdateNumbers({}, each) for each in sums]) == {
        "clip_ratio/low_mean": 0.3,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/low_min": 0.2,
        "clip_ratio/high_max": 0.3,
    }
    assert of_several_updates([UpdateNumbers({"loss": 1.0}, {"loss": (3.0, 2.0)})]) == {"loss": 1.5}


def spread(world: World, log_ratios: NDArray[np.float32], counts: list[int]) -> dict[str, float]:
    """Return what ranks tell together that have so many of the numbers each; runs on every rank."""
    ranks = RankGroup()
    start = sum(counts[: world.rank])
    try:
        return mismatch_spread(log_ratios[start : start + counts[world.rank]], ranks)
    finally:
        ranks.close()


def log_ratios_of_kind(kind: str) -> NDArray[np.float32]:
    generator = np.random.default_rng(3)
    match kind:
        case "near 1":
            return generator.normal(0, 1e-4, 1001).astype(np.float32)
        case "far":
            return np.concatenate([generator.normal(-0.3, 0.5, 1000), [-30.0]]).astype(np.float32)
        case "above":
            return generator.uniform(0.2, 0.4, 1001).astype(np.float32)
        case _:
            return np.zeros(1001, np.float32)


@pytest.mark.parametrize("counts", [[1001], [3, 998], [0, 1001]], ids=str)
@pytest.mark.parametrize("kind", ["near 1", "far", "above", "on-policy"])
def test_quantiles_and_the_largest_difference_are_those_of_all_tokens(kind: str, counts: list[int], pools: Any) -> None:
    log_ratios = log_ratios_of_kind(kind)

    told = pools(len(counts)).run(spread, log_ratios, counts)

    exact = log_ratios.astype(np.float64)
    metrics = told[0]
    ratios = {name.rpartition("/")[2]: math.log(value) for name, value in metrics.items() if "ratio/" in name}
    assert all(of_rank == metrics for of_rank in told)
    assert metrics["sampling/sampling_logp_difference/max"] == np.abs(exact).max()
    assert (ratios["min"], ratios["max"]) == pytest.approx((exact.min(), exact.max()), rel=1e-9, abs=1e-12)
    for name, share in {"p01": 0.01, "median": 0.5, "p99": 0.99}.items():
        assert ratios[name] == pytest.approx(np.quantile(exact, share), rel=0.004, abs=1e-12)


@pytest.mark.parametrize("numbers", [[0.25], [-0.5, 0.25], [-0.125, 0.0, 0.5, 0.25]])
def test_quantiles_of_few_tokens_are_interpolated(numbers: list[float]) -> None:
    metrics = mismatch_spread(np.array(numbers, np.float32), RankGroup())

    expected = np.quantile(np.array(numbers), [0.01, 0.5, 0.99])
    found = [metrics[f"sampling/importance_sampling_ratio/{name}"] for name in ("p01", "median", "p99")]
    assert np.log(found) == pytest.approx(expected, abs=0.004 * np.abs(numbers).max())


def test_a_step_in_which_nothing_was_sampled_tells_no_ratios(pools: Any) -> None:
    assert pools(2).run(spread, np.zeros(0, np.float32), [0, 0]) == [{}, {}]
