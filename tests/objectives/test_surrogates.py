"""Every surrogate against NumPy: values and gradients, at the clip, on policy, and far beyond what float32 can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.objectives.surrogates import CISPO, DPPO, GSPO, SAPO, Actions, Clip, ClipCov, GSPOToken, KLCov, Reinforce
from tests.objectives.cases import actions_of, draw, means, surrogate_found, tokens_of
from tests.oracle import policy as oracle
from tests.oracle.policy import Case, Found

EXACT = {"rtol": 1e-9, "atol": 1e-9}
PAIRS: dict[str, tuple[Any, Callable[[Case], Found]]] = {
    "clip": (Clip(), lambda case: oracle.clip(case, 0.2, 0.2)),
    "clip higher": (Clip(0.1, 0.28), lambda case: oracle.clip(case, 0.1, 0.28)),
    "dual clip": (Clip(0.2, 0.2, 1.4), lambda case: oracle.clip(case, 0.2, 0.2, 1.4)),
    "gspo": (GSPO(), lambda case: oracle.gspo(case, 3e-4, 4e-4)),
    "gspo, wide": (GSPO(0.06, 0.09), lambda case: oracle.gspo(case, 0.06, 0.09)),
    "gspo_token": (GSPOToken(), lambda case: oracle.gspo_token(case, 3e-4, 4e-4)),
    "gspo_token, wide": (GSPOToken(0.06, 0.09), lambda case: oracle.gspo_token(case, 0.06, 0.09)),
    "cispo": (CISPO(), lambda case: oracle.cispo(case, 1.0, 4.0)),
    "cispo, narrow": (CISPO(0.1, 0.2), lambda case: oracle.cispo(case, 0.1, 0.2)),
    "dppo": (DPPO(), lambda case: oracle.dppo(case, "tv", 0.15, 0.15, 20.0)),
    "dppo, narrow": (DPPO("tv", 0.01, 0.03, 1.2), lambda case: oracle.dppo(case, "tv", 0.01, 0.03, 1.2)),
    "sapo": (SAPO(), lambda case: oracle.sapo(case, 1.0, 1.05)),
    "sapo, steep": (SAPO(3.0, 0.5), lambda case: oracle.sapo(case, 3.0, 0.5)),
    "reinforce": (Reinforce(), oracle.reinforce),
}
SURROGATES = [pair[0] for pair in PAIRS.values()]
each_pair = pytest.mark.parametrize(("surrogate", "expected"), PAIRS.values(), ids=PAIRS)
each_surrogate = pytest.mark.parametrize("surrogate", SURROGATES, ids=PAIRS)


@each_pair
@pytest.mark.parametrize("seed", range(3))
def test_terms_and_gradients_are_those_of_the_paper(surrogate: Any, expected: Any, seed: int) -> None:
    case = draw(seed)

    terms, gradient = surrogate_found(surrogate, case)

    np.testing.assert_allclose(terms, expected(case)[0], **EXACT)
    np.testing.assert_allclose(gradient, expected(case)[1], **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_were_chosen_by_their_covariance_are_left_out_or_held_back(seed: int) -> None:
    case = draw(seed)
    chosen = ~case.entropy_mask
    plain = oracle.clip(case, 0.1, 0.28)
    ratios = np.exp(case.log_ratio)

    left_out = surrogate_found(ClipCov(0.1, 0.28), case)
    held_back = surrogate_found(KLCov(0.7), case)

    for term, expected in zip(left_out, plain, strict=True):
        np.testing.assert_allclose(term, np.where(chosen, 0.0, expected), **EXACT)
    penalty, slope = chosen * 0.7 * np.abs(case.log_ratio), chosen * 0.7 * np.sign(case.log_ratio)
    np.testing.assert_allclose(held_back[0], penalty - ratios * case.advantages, **EXACT)
    np.testing.assert_allclose(held_back[1], (slope - ratios * case.advantages) * case.weights, **EXACT)
    shares = means(KLCov().sums(actions_of(case, torch.tensor(case.logprobs))))
    assert shares == {"covariance/chosen_mean": pytest.approx(chosen.mean())}


@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_of_two_outcomes_may_be_their_kl(seed: int) -> None:
    drawn = draw(seed, spread=0.5)
    assert drawn.proximal is not None
    case = replace(drawn, logprobs=drawn.logprobs - 2, proximal=drawn.proximal - 2)  # no probability above 1

    terms, gradient = surrogate_found(DPPO("kl", 0.002, 0.004, 1.5), case)

    expected = oracle.dppo(case, "kl", 0.002, 0.004, 1.5)
    assert 0 < np.sum(expected[1] == 0) < terms.size
    np.testing.assert_allclose(terms, expected[0], **EXACT)
    np.testing.assert_allclose(gradient, expected[1], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_token_has_a_finite_divergence(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([0.0, -1e-9, -50.0, 0.0], dtype=dtype)
    log_ratio = torch.tensor([0.0, 20.0, -50.0, 1e-9], dtype=dtype)
    actions = Actions(logprobs, log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=dtype), tokens_of(draw()))

    terms = DPPO("kl", 0.05, 0.05).terms(actions)

    assert torch.isfinite(terms).all()
    assert terms.tolist()[1:3] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["clip", "dual clip", "gspo, wide", "sapo"])
def test_the_oracle_itself_has_the_gradient_of_its_values(name: str) -> None:
    case, step = draw(4), 1e-6
    slopes = []
    for place in range(case.logprobs.size):
        moved = [case.logprobs + sign * step * (np.arange(case.logprobs.size) == place) for sign in (1, -1)]
        above, below = (PAIRS[name][1](replace(case, logprobs=values))[0] for values in moved)
        slopes.append(np.sum(case.weights * (above - below)) / (2 * step))

    np.testing.assert_allclose(PAIRS[name][1](case)[1], slopes, rtol=1e-6, atol=1e-6)


@each_pair
def test_the_first_update_has_the_policy_gradient(surrogate: Any, expected: Any) -> None:
    case = draw(on_policy=True, flat=True)
    sequence_mean = replace(case, weights=1 / case.per_sequence(len, case.logprobs))

    _, gradient = surrogate_found(surrogate, sequence_mean)

    np.testing.assert_allclose(gradient, -case.advantages * sequence_mean.weights, **EXACT)


@each_surrogate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_clipped_in_the_first_update(surrogate: Any, dtype: torch.dtype) -> None:
    case = draw(on_policy=True)
    logprobs = torch.tensor(case.logprobs, dtype=dtype)
    actions = Actions(
        logprobs, logprobs - logprobs.detach(), torch.tensor(case.advantages, dtype=dtype), tokens_of(case)
    )

    shares = means(surrogate.sums(actions))

    assert set(shares.values()) <= {0.0}


@each_surrogate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1000.0, -1000.0])
def test_a_log_ratio_of_a_thousand_nats_gives_finite_terms_and_gradients(
    surrogate: Any, dtype: torch.dtype, far: float
) -> None:
    advantages = torch.tensor([1.5, -1.5, 1.0, -1.0], dtype=dtype)
    logprobs = torch.full((4,), -2.0, dtype=dtype, requires_grad=True)
    tokens = tokens_of(draw())._replace(sequence=torch.tensor([0, 0, 1, 2]), sequences=3)
    log_ratio = logprobs - (-2.0 - torch.tensor([far, far, 0.0, far], dtype=dtype))

    terms = surrogate.terms(Actions(logprobs, log_ratio, advantages, tokens))
    (gradient,) = torch.autograd.grad(terms.sum(), logprobs)

    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.5, 2.0, -2.56, 0.0),  # rewarded and already likelier: the bound 1.28 ends it
        (0.5, 2.0, -1.0, -1.0),  # rewarded, but less likely: nothing ends it
        (0.5, -2.0, 1.8, 0.0),  # punished and already less likely: the bound 0.9 ends it
        (1.5, -2.0, 3.0, 3.0),  # punished, but likelier: nothing ends it below the ceiling
        (4.0, -2.0, 6.0, 0.0),  # punished and far likelier: the ceiling 3 ends it
        (4.0, 2.0, -2.56, 0.0),  # the ceiling is not for rewarded tokens
    ],
)
def test_a_clip_ends_the_gradient_only_in_the_direction_of_the_advantage(
    ratio: float, advantage: float, term: float, slope: float
) -> None:
    case = replace(draw(), logprobs=np.log([0.2]), proximal=np.log([0.2 / ratio]), advantages=np.array([advantage]))
    case = replace(case, sequence=np.zeros(1, dtype=np.int64), weights=np.ones(1))

    terms, gradient = surrogate_found(Clip(0.1, 0.28, 3.0), case)

    np.testing.assert_allclose((terms[0], gradient[0]), (term, slope), **EXACT)


def test_clipped_shares_count_by_the_sign_of_the_advantage() -> None:
    ratios = np.array([0.5, 0.5, 1.5, 1.5, 5.0, 1.0, 5.0, 1.0])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    actions = Actions(torch.zeros(8), torch.tensor(np.log(ratios)), torch.tensor(advantages), tokens_of(draw()))

    shares = means(Clip(0.2, 0.2, 3.0).sums(actions))

    assert shares == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 8,
            "clip_ratio/high_mean": 2 / 8,
            "clip_ratio/region_mean": 3 / 8,
            "clip_ratio/dual_mean": 1 / 8,
        }
    )


@pytest.mark.parametrize("surrogate", [GSPO(0.06, 0.09), GSPOToken(0.06, 0.09)], ids=["gspo", "gspo_token"])
def test_clipped_shares_of_a_sequence_ratio_count_its_tokens(surrogate: Any) -> None:
    case = draw(2, flat=True)
    ratio = np.exp(case.per_sequence(np.mean, case.log_ratio))

    shares = means(surrogate.sums(actions_of(case, torch.tensor(case.logprobs))))

    low, high = (ratio < 0.94) & (case.advantages < 0), (ratio > 1.09) & (case.advantages > 0)
    assert low.any() or high.any()
    assert shares["clip_ratio/low_mean"] == pytest.approx(low.mean())
    assert shares["clip_ratio/high_mean"] == pytest.approx(high.mean())
    assert shares["clip_ratio/region_mean"] == pytest.approx((low | high).mean())


def test_a_cispo_bound_is_relative_so_that_a_token_of_the_policy_itself_has_weight_one() -> None:
    case = draw(on_policy=True)

    terms, gradient = surrogate_found(CISPO(0.2, 0.2), case)

    np.testing.assert_allclose(terms, -case.advantages * case.logprobs, **EXACT)
    np.testing.assert_allclose(gradient, -case.advantages * case.weights, **EXACT)


def test_a_cispo_token_beyond_its_bound_keeps_a_gradient() -> None:
    case = draw(spread=3.0)
    beyond = np.exp(case.log_ratio) > 1.2

    _, gradient = surrogate_found(CISPO(1.0, 0.2), case)

    assert beyond.any()
    np.testing.assert_allclose(gradient[beyond], (-1.2 * case.advantages * case.weights)[beyond], **EXACT)


def test_cispo_counts_weights_at_either_bound() -> None:
    case = draw(spread=2.0)
    ratio = np.exp(case.log_ratio)

    shares = means(CISPO(0.5, 1.0).sums(actions_of(case, torch.tensor(case.logprobs))))

    assert shares["clip_ratio/low_mean"] == pytest.approx((ratio < 0.5).mean())
    assert shares["clip_ratio/high_mean"] == pytest.approx((ratio > 2.0).mean())


def test_gspo_and_gspo_token_have_one_gradient_where_a_sequence_has_one_advantage() -> None:
    case = draw(7, flat=True)
    sequence_mean = replace(case, weights=1 / case.per_sequence(len, case.logprobs))

    whole, own = (surrogate_found(each, sequence_mean) for each in (GSPO(0.06, 0.09), GSPOToken(0.06, 0.09)))

    np.testing.assert_allclose(own[1], whole[1], **EXACT)
    np.testing.assert_allclose(own[0], whole[0], **EXACT)


@pytest.mark.parametrize("far", [-21.0, -19.0, 19.0, 21.0, 1000.0])
def test_gspo_and_gspo_token_have_one_bound_of_the_mean_log_ratio(far: float) -> None:
    case = draw(7, flat=True)
    assert case.proximal is not None
    # No clip, so nothing but the bound can end a gradient; every mean is `far`.
    mean = case.per_sequence(np.mean, case.log_ratio)
    case = replace(case, proximal=case.proximal + mean - far, weights=1 / case.per_sequence(len, case.logprobs))
    ratio = np.exp(np.clip(far, -20, 20))

    whole, own = (surrogate_found(each, case) for each in (GSPO(1.0, np.inf), GSPOToken(1.0, np.inf)))

    for terms, gradient in (whole, own):
        np.testing.assert_allclose(terms, -ratio * case.advantages, rtol=1e-6)
        np.testing.assert_allclose(gradient, -ratio * case.advantages * case.weights * (abs(far) < 20), rtol=1e-6)
