"""Corrections for the sampler: what they weight, what they drop, and that no length alone drops anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.policy import (
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    MaskConfig,
    OffPolicyMaskConfig,
    TruncateConfig,
)
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Clip
from tests.objectives.cases import draw, means, objective_found, scores_of, tokens_of
from tests.oracle import policy as oracle
from tests.oracle.policy import Array, Case

EXACT = {"rtol": 1e-9, "atol": 1e-9}
KINDS: dict[str, tuple[CorrectionConfig, dict[str, Any]]] = {
    "truncate": (TruncateConfig(cap=1.1), {"kind": "truncate", "level": "token", "low": 0.0, "high": 1.1}),
    "truncate, sequence": (
        TruncateConfig(cap=1.01, level="sequence"),
        {"kind": "truncate", "level": "sequence", "low": 0.0, "high": 1.01},
    ),
    "mask": (MaskConfig(low=0.8, high=1.3), {"kind": "mask", "level": "token", "low": 0.8, "high": 1.3}),
    "mask, unweighted": (
        MaskConfig(low=0.8, high=1.3, weighted=False),
        {"kind": "mask", "level": "token", "low": 0.8, "high": 1.3, "weighted": False},
    ),
    "mask, sequence": (
        MaskConfig(low=0.97, high=1.05, level="sequence"),
        {"kind": "mask", "level": "sequence", "low": 0.97, "high": 1.05},
    ),
}


def corrected(correction: CorrectionConfig) -> PolicyGradient:
    return PolicyGradient(Clip(), correction=correction)


def expected(case: Case, weights: Array) -> tuple[Array, Array]:
    terms, gradient = oracle.clip(case, 0.2, 0.2)
    return terms * weights, gradient * weights


@pytest.mark.parametrize(("correction", "options"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_correction_multiplies_the_surrogate_by_a_constant(
    correction: CorrectionConfig, options: dict[str, Any], on_policy: bool
) -> None:
    case = draw(1, on_policy=on_policy)
    weights = oracle.correction(case, **options)
    terms, gradient = expected(case, weights)

    found = objective_found(corrected(correction), case)

    assert np.unique(weights).size > 1
    np.testing.assert_allclose(found[0], terms, **EXACT)
    np.testing.assert_allclose(found[1], gradient, **EXACT)


@pytest.mark.parametrize("length", [10, 100, 10_000])
def test_a_small_difference_per_token_never_drops_a_long_sequence(length: int) -> None:
    zeros = np.zeros(length)
    case = Case(
        logprobs=zeros - 1.0,
        proximal=None,
        advantages=zeros + 1.0,
        sequence=np.zeros(length, dtype=np.int64),
        weights=zeros + 1.0,
        sampler=zeros - 1.012,
        reference=zeros,
        entropy=zeros,
        entropy_mask=zeros > 0,
    )

    _, gradient, _ = objective_found(corrected(MaskConfig(low=0.5, high=3.0, level="sequence")), case)

    np.testing.assert_allclose(gradient, -np.exp(0.012), **EXACT)


@pytest.mark.parametrize("where", ["reward", "reward_to_go"])
def test_a_good_sequence_stays_however_much_kl_is_taken_from_its_advantage(where: Any) -> None:
    """By hand: two sequences of two tokens, advantages 0.5 and -0.5, each token 1 nat off sampler and reference.

    The KL, coefficient 1, makes them -0.5 and -1.5 (of first tokens -1.5 and -2.5 with what follows); the bad one goes.
    """
    ones, sequence = np.ones(4), np.array([0, 0, 1, 1])
    case = Case(
        logprobs=-2 * ones,
        proximal=None,
        advantages=np.array([0.5, 0.5, -0.5, -0.5]),
        sequence=sequence,
        weights=ones,
        sampler=-ones,
        reference=-3 * ones,
        entropy=ones,
        entropy_mask=ones > 0,
    )
    kl = KLConfig(coefficient=1.0, estimator="k1", where=where)
    objective = PolicyGradient(Clip(), kl, off_policy_mask=OffPolicyMaskConfig(max_kl=0.5))

    terms, gradient, _ = objective_found(objective, case)

    first = 0.5 if where == "reward" else 1.5
    np.testing.assert_allclose(terms, [first, 0.5, 0.0, 0.0], **EXACT)
    np.testing.assert_allclose(gradient, [first, 0.5, 0.0, 0.0], **EXACT)


@pytest.mark.parametrize(("correction", "_"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("far", [1000.0, -1000.0, np.inf, -np.inf, np.nan])
def test_a_sampler_far_off_or_silent_gives_finite_terms_and_gradients(
    correction: CorrectionConfig, _: Any, far: float
) -> None:
    case = draw()
    case = replace(case, sampler=np.where(case.sequence == 1, far, case.sampler))

    terms, gradient, _ = objective_found(corrected(correction), case)

    assert np.isfinite(terms).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("correction", [TruncateConfig(), MaskConfig()], ids=["truncate", "mask"])
def test_a_token_the_sampler_says_nothing_of_counts_as_agreed(correction: CorrectionConfig) -> None:
    case = draw()
    silent = replace(case, sampler=np.full_like(case.sampler, np.nan))

    found = objective_found(corrected(correction), silent)

    np.testing.assert_allclose(found[0], oracle.clip(case, 0.2, 0.2)[0], **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_failed_sequences_that_the_policy_left_behind_are_dropped(seed: int) -> None:
    case = draw(seed, flat=True)
    kept = oracle.kept_by_policy(case, 0.02)
    terms, gradient = expected(case, kept.astype(np.float64))

    found = objective_found(PolicyGradient(Clip(), off_policy_mask=OffPolicyMaskConfig(max_kl=0.02)), case)

    np.testing.assert_allclose(found[0], terms, **EXACT)
    np.testing.assert_allclose(found[1], gradient, **EXACT)


def test_only_failed_sequences_are_dropped_by_the_off_policy_mask() -> None:
    case = draw(flat=True)
    left = replace(case, sampler=case.logprobs + 1.0)

    shown = means(
        PolicyGradient(Clip(), off_policy_mask=OffPolicyMaskConfig(max_kl=0.5)).sums(scores_of(left), tokens_of(left))
    )

    assert 0 < (case.advantages < 0).mean() < 1
    assert shown["off_policy/dropped_mean"] == pytest.approx((case.advantages < 0).mean())


def test_neither_kl_nor_entropy_is_corrected() -> None:
    case = draw()
    nothing = MaskConfig.model_construct(low=2.0, high=1.0, level="token", weighted=True)
    objective = PolicyGradient(Clip(), KLConfig(coefficient=0.3), EntropyConfig(coefficient=0.1), nothing)

    terms, _, by_entropy = objective_found(objective, case)

    np.testing.assert_allclose(
        terms, 0.3 * oracle.kl("k3", case.logprobs, case.reference)[0] - 0.1 * case.entropy, **EXACT
    )
    np.testing.assert_allclose(by_entropy, -0.1 * case.weights, **EXACT)


@pytest.mark.parametrize("on_policy", [True, False])
def test_metrics_compare_trainer_and_sampler_before_any_correction(on_policy: bool) -> None:
    case = draw(on_policy=on_policy)
    case = replace(case, sampler=np.where(np.arange(case.sampler.size) % 7 == 0, np.nan, case.sampler))
    trainer = case.logprobs if case.proximal is None else case.proximal
    difference = (trainer - case.sampler)[np.isfinite(case.sampler)]

    shown = means(corrected(TruncateConfig(cap=1.1)).sums(scores_of(case), tokens_of(case)))

    assert shown["sampling/importance_sampling_ratio/mean"] == pytest.approx(np.exp(difference).mean(), rel=1e-9)
    assert shown["sampling/sampling_logp_difference/mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-9)
    assert shown["sampling/mismatch_kl"] == pytest.approx((np.exp(difference) - difference - 1).mean(), rel=1e-9)
    assert shown["correction/changed_mean"] == pytest.approx((np.exp(difference) > 1.1).sum() / case.sampler.size)


def test_a_mask_reports_the_share_it_drops() -> None:
    case = draw(1)
    weights = oracle.correction(case, "mask", "sequence", 0.97, 1.05)

    shown = means(corrected(KINDS["mask, sequence"][0]).sums(scores_of(case), tokens_of(case)))

    assert 0 < (weights == 0).mean() < 1
    assert shown["correction/changed_mean"] == pytest.approx((weights == 0).mean())
