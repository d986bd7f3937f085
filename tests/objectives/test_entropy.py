"""The entropy bonus, the choice of tokens by entropy, and the controller of the bonus."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from holdfast.config.sections.policy import EntropyConfig
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.regularisers import acting_entropy_coefficient, entropy_threshold, next_entropy_coefficient
from holdfast.objectives.surrogates import GSPO, Clip
from tests.objectives.cases import draw, means, objective_found, scores_of, tokens_of
from tests.oracle import policy as oracle

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def test_a_bonus_takes_the_weighted_entropy_from_the_loss() -> None:
    case = draw()

    terms, gradient, by_entropy = objective_found(PolicyGradient(Clip(), entropy=EntropyConfig(coefficient=0.2)), case)

    np.testing.assert_allclose(terms, oracle.clip(case, 0.2, 0.2)[0] - 0.2 * case.entropy, **EXACT)
    np.testing.assert_allclose(gradient, oracle.clip(case, 0.2, 0.2)[1], **EXACT)
    np.testing.assert_allclose(by_entropy, -0.2 * case.weights, **EXACT)


def test_tokens_of_low_entropy_train_neither_surrogate_nor_bonus() -> None:
    case = draw()
    objective = PolicyGradient(Clip(), entropy=EntropyConfig(coefficient=0.2, top_quantile=0.4))
    expected = np.where(case.entropy_mask, oracle.clip(case, 0.2, 0.2)[0] - 0.2 * case.entropy, 0.0)

    terms, gradient, by_entropy = objective_found(objective, case)

    np.testing.assert_allclose(terms, expected, **EXACT)
    assert not gradient[~case.entropy_mask].any()
    assert not by_entropy[~case.entropy_mask].any()


def test_the_ratio_of_a_sequence_still_counts_tokens_of_low_entropy() -> None:
    case = draw()
    masked = replace(case, weights=np.where(case.entropy_mask, case.weights, 0.0))
    expected = oracle.gspo(masked, 0.06, 0.09)

    terms, gradient, _ = objective_found(
        PolicyGradient(GSPO(0.06, 0.09), entropy=EntropyConfig(top_quantile=0.4)), case
    )

    np.testing.assert_allclose(terms, np.where(case.entropy_mask, expected[0], 0.0), **EXACT)
    np.testing.assert_allclose(gradient, expected[1], **EXACT)


def test_the_dropped_share_is_reported() -> None:
    case = draw()

    shown = means(
        PolicyGradient(Clip(), entropy=EntropyConfig(top_quantile=0.4)).sums(scores_of(case), tokens_of(case))
    )

    assert shown["entropy_mask/dropped_mean"] == pytest.approx((~case.entropy_mask).mean())
    assert shown["entropy"] == pytest.approx(case.entropy.mean())


@pytest.mark.parametrize(("share", "trained"), [(0.07, 7), (0.2, 20), (0.205, 21), (1.0, 100), (0.001, 1)])
def test_the_threshold_lets_the_asked_share_of_tokens_through(share: float, trained: int) -> None:
    entropies = np.random.default_rng(0).permutation(100) / 7

    assert (entropies >= entropy_threshold(entropies, share)).sum() == trained


def test_the_threshold_depends_on_no_order_and_exists_without_tokens() -> None:
    entropies = np.random.default_rng(0).exponential(1.0, 300)

    assert entropy_threshold(entropies, 0.2) == entropy_threshold(entropies[::-1].reshape(3, 100), 0.2)
    assert entropy_threshold(np.zeros(0), 0.2) == -math.inf


@pytest.mark.parametrize(
    ("coefficient", "measured", "after"),
    [(0.01, 0.1, 0.015), (0.01, 0.2, 0.015), (0.01, 0.3, 0.005), (0.099, 0.1, 0.1), (0.001, 0.3, 0.0)],
)
def test_the_bonus_grows_below_the_target_and_shrinks_above_it_within_bounds(
    coefficient: float, measured: float, after: float
) -> None:
    config = EntropyConfig(coefficient=0.01, target=0.2, step=0.005, highest=0.1)

    assert next_entropy_coefficient(config, coefficient, measured) == pytest.approx(after, abs=1e-12)


def test_an_adaptive_bonus_rests_above_its_target() -> None:
    config = EntropyConfig(coefficient=0.01, target=0.2)

    assert acting_entropy_coefficient(config, 0.03, 0.3) == 0.0
    assert acting_entropy_coefficient(config, 0.03, 0.1) == 0.03
    assert acting_entropy_coefficient(config, 0.03, None) == 0.03
    assert acting_entropy_coefficient(EntropyConfig(coefficient=0.03), 0.03, 5.0) == 0.03


def test_the_bonus_stays_without_a_target_or_a_measurement() -> None:
    assert next_entropy_coefficient(EntropyConfig(coefficient=0.03), 0.03, 0.1) == 0.03
    assert next_entropy_coefficient(EntropyConfig(coefficient=0.03, target=0.2), 0.03, math.nan) == 0.03
