"""Advantages of tokens are the sums that define them, whatever the order and lengths of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.advantages.group import explained_variance, generalised_advantages, spread_of, whitened
from tests.oracle import critic as oracle

LENGTHS = (1, 7, 3, 12, 1, 5)


def ragged(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return rewards, values and sequences of interleaved tokens, and the places of each sequence's."""
    generator = np.random.default_rng(seed)
    sequence = generator.permutation(np.repeat(np.array([4, 0, 9, 2, 3, 7]), LENGTHS))
    places = [np.flatnonzero(sequence == number) for number in np.unique(sequence)]
    rewards, values = generator.normal(size=(2, sequence.size))
    return rewards, values, sequence, places


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_advantages_are_the_sums_of_the_paper(gamma: float, lam: float) -> None:
    rewards, values, sequence, places = ragged(0)

    found = generalised_advantages(rewards, values, sequence, gamma, lam)

    for members in places:
        expected = oracle.gae(rewards[members].tolist(), values[members].tolist(), gamma, lam)
        np.testing.assert_allclose(found[members], expected, rtol=0, atol=1e-12)


def test_a_sequence_knows_nothing_of_its_neighbours() -> None:
    rewards, values, sequence, places = ragged(1)
    changed = rewards.copy()
    changed[places[3]] += 100.0

    before, after = (generalised_advantages(each, values, sequence, 0.9, 0.9) for each in (rewards, changed))

    others = np.setdiff1d(np.arange(sequence.size), places[3])
    np.testing.assert_array_equal(before[others], after[others])
    assert (after[places[3]] > before[places[3]]).all()


def test_a_rank_without_tokens_has_no_advantages() -> None:
    assert generalised_advantages(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), 1.0, 0.95).shape == (0,)


def test_whitening_is_of_all_ranks_together() -> None:
    parts = [np.random.default_rng(seed).normal(5.0, 3.0, size) for seed, size in ((0, 11), (1, 4), (2, 0))]
    told: list[list[tuple[int, float]]] = []

    def gather(mine: tuple[int, float]) -> list[tuple[int, float]]:
        """Answer as all ranks would: they send counts and sums first, counts and squares then."""
        whole = np.concatenate(parts)
        rounds = [[(p.size, p.sum()) for p in parts], [(p.size, ((p - whole.mean()) ** 2).sum()) for p in parts]]
        told.append(rounds[len(told)])
        assert mine == (told[-1][0][0], pytest.approx(told[-1][0][1]))
        return told[-1]

    spread = spread_of(parts[0], gather)

    expected = oracle.whiten([part.tolist() for part in parts], 1e-8)
    for part, values in zip(parts, expected, strict=True):
        np.testing.assert_allclose(whitened(part, spread, 1e-8), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
@pytest.mark.parametrize("numbers", [np.full(3, 0.1), np.full(6, 0.7), np.full(9, -7e8), np.array([3.0]), np.zeros(0)])
def test_tokens_that_are_all_alike_have_no_advantage(numbers: np.ndarray, epsilon: float) -> None:
    """Their mean is no such number, in its last digit: 0.1 + 0.1 + 0.1 is more than 0.3."""
    found = whitened(numbers, spread_of(numbers, lambda mine: [mine]), epsilon)

    assert not found.any()


def test_the_explained_variance_is_a_share_of_the_returns() -> None:
    returns, values = np.random.default_rng(3).normal(size=(2, 40))
    of_returns, errors = (spread_of(numbers, lambda mine: [mine]) for numbers in (returns, returns - values))

    found = explained_variance(of_returns, errors)

    assert found == pytest.approx(oracle.explained_variance(returns.tolist(), values.tolist()), abs=1e-12)
    assert explained_variance(spread_of(np.ones(4), lambda mine: [mine]), errors) is None
