"""Which tokens are chosen by their covariance, against plain Python."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from holdfast.objectives.policy import covariances, highest, some_between


def drawn(seed: int, size: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return -generator.exponential(2.0, size), generator.normal(size=size), generator.random(size)


@pytest.mark.parametrize("seed", range(3))
def test_a_covariance_is_a_token_s_part_of_that_of_logprob_and_advantage(seed: int) -> None:
    logprobs, advantages, _ = drawn(seed)

    values = covariances(logprobs, advantages)

    mean, centre = statistics.fmean(logprobs), statistics.fmean(advantages)
    by_hand = [(p - mean) * (a - centre) for p, a in zip(logprobs.tolist(), advantages.tolist(), strict=True)]
    np.testing.assert_allclose(values, by_hand, rtol=1e-12, atol=1e-15)
    assert values.mean() == pytest.approx(np.cov(logprobs, advantages, bias=True)[0, 1], rel=1e-9)
    order = np.random.default_rng(9).permutation(values.size)
    np.testing.assert_array_equal(covariances(logprobs[order], advantages[order]), values[order])


@pytest.mark.parametrize("share", [0.002, 0.01, 0.05, 1.0])
def test_a_share_of_all_tokens_is_chosen_at_random_between_the_bounds(share: float) -> None:
    logprobs, advantages, priorities = drawn(4)
    values = covariances(logprobs, advantages)
    between = [place for place, value in enumerate(values) if 0.5 < value < 3.0]

    chosen = some_between(values, priorities, share, 0.5, 3.0)

    first = sorted(between, key=lambda place: priorities[place])[: max(1, int(share * 400))]
    assert np.flatnonzero(chosen).tolist() == sorted(first)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.2, 1.0])
def test_the_highest_are_a_share_of_all_tokens(share: float) -> None:
    values = covariances(*drawn(5)[:2])

    chosen = highest(values, share)

    first = sorted(range(400), key=lambda place: -values[place])[: max(1, int(share * 400))]
    assert np.flatnonzero(chosen).tolist() == sorted(first)


def test_nothing_is_chosen_where_there_is_nothing() -> None:
    nothing = np.zeros(0)

    assert not some_between(np.ones(5), np.arange(5.0), 0.5, 2.0, 3.0).any()
    assert some_between(nothing, nothing, 0.5, 0.0, 1.0).size == highest(covariances(nothing, nothing), 0.5).size == 0
