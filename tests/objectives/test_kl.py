"""KL towards the reference: estimates, their gradients, where they enter, and the controller of their weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from holdfast.config.sections.policy import KLConfig, KLEstimator
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.regularisers import kl_estimate, next_kl_coefficient
from holdfast.objectives.surrogates import Reinforce
from tests.objectives.cases import draw, means, objective_found, scores_of, tokens_of
from tests.oracle import policy as oracle
from tests.oracle.policy import Case

EXACT = {"rtol": 1e-9, "atol": 1e-9}
ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def objective(**options: Any) -> PolicyGradient:
    return PolicyGradient(Reinforce(), KLConfig.model_construct(**({"coefficient": 0.3} | options)))


def without_reward(case: Case) -> Case:
    """Return the case with advantages 0, so that nothing but the KL is left of a loss."""
    return replace(case, advantages=np.zeros_like(case.advantages))


@each_estimator
@pytest.mark.parametrize("spread", [0.3, 8.0, 40.0], ids=["near", "beyond 10", "beyond 20"])
def test_estimates_and_their_gradients_are_schulmans(estimator: KLEstimator, spread: float) -> None:
    case = draw(spread=spread)
    values, slopes = oracle.kl(estimator, case.logprobs, case.reference)

    terms, gradient, _ = objective_found(objective(estimator=estimator), without_reward(case))

    np.testing.assert_allclose(terms, 0.3 * values, **EXACT)
    np.testing.assert_allclose(gradient, 0.3 * slopes * case.weights, **EXACT)


@each_estimator
@pytest.mark.parametrize("on_policy", [True, False])
def test_importance_weights_multiply_value_and_gradient(estimator: KLEstimator, on_policy: bool) -> None:
    case = draw(on_policy=on_policy)
    values, slopes = oracle.weighted_kl(estimator, case)

    terms, gradient, _ = objective_found(objective(estimator=estimator, importance_weighted=True), without_reward(case))

    np.testing.assert_allclose(terms, 0.3 * values, **EXACT)
    np.testing.assert_allclose(gradient, 0.3 * slopes * case.weights, **EXACT)


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the gradient by logits of KL(policy || reference), summed over the whole vocabulary."""
    live = logits.clone().requires_grad_()
    policy = live.log_softmax(-1)
    ((policy.exp() * (policy - reference)).sum()).backward()
    assert live.grad is not None
    return live.grad


def expected_gradient(logits: torch.Tensor, reference: torch.Tensor, of: Any) -> torch.Tensor:
    """Return the gradient by logits of an estimate, averaged over every token the policy may sample."""
    live = logits.clone().requires_grad_()
    policy = live.log_softmax(-1)
    (policy.detach().exp() * of(policy, reference)).sum().backward()
    assert live.grad is not None
    return live.grad


@pytest.mark.parametrize(
    ("estimator", "weighted", "right"),
    [
        ("k1", False, False),
        ("k3", False, False),
        ("k2", False, True),
        ("straight_through", False, True),
        ("k1", True, True),
        ("k3", True, True),
        ("k2", True, True),
    ],
)
def test_which_estimates_have_the_gradient_of_the_kl_divergence(
    estimator: KLEstimator, weighted: bool, right: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)  # k3 below its bound of 10
    reference = 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(-1)
    made = objective(estimator=estimator, importance_weighted=weighted, coefficient=1.0)
    tokens = tokens_of(draw())._replace(
        per_token={"advantages": torch.zeros(40, dtype=torch.float64), "reference_logprobs": reference}
    )

    found = expected_gradient(logits, reference, lambda policy, _: made.token_terms(policy, None, tokens))

    assert torch.allclose(found, exact_gradient(logits, reference), atol=1e-9) is right


def test_the_gradient_of_k1_in_a_loss_is_zero_on_average() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, generator=generator, dtype=torch.float64)
    reference = torch.randn(40, generator=generator, dtype=torch.float64).log_softmax(-1)

    found = expected_gradient(logits, reference, lambda policy, other: kl_estimate("k1", policy, other))

    assert found.abs().max() < 1e-12


@each_estimator
@pytest.mark.parametrize("far", [11.5, 20.5, 1000.0, -11.5, -20.5, -1000.0])
def test_no_penalty_lets_go_of_a_policy_far_away(estimator: KLEstimator, far: float) -> None:
    case = without_reward(draw())
    case = replace(case, reference=case.logprobs + far)

    _, gradient, _ = objective_found(objective(estimator=estimator, coefficient=1.0), case)

    slopes = gradient / case.weights
    assert (np.sign(slopes) == (1.0 if estimator == "k1" else -np.sign(far))).all()
    assert (np.abs(slopes) > 0.999).all()
    assert (np.abs(slopes) < 20.001).all()


@each_estimator
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("far", [1000.0, -1000.0])
def test_a_reference_a_thousand_nats_away_gives_finite_terms_and_gradients(
    estimator: KLEstimator, weighted: bool, far: float
) -> None:
    case = draw()
    case = replace(case, reference=case.logprobs + far, proximal=case.logprobs - far)

    terms, gradient, _ = objective_found(objective(estimator=estimator, importance_weighted=weighted), case)

    assert np.isfinite(terms).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_in_the_reward_is_taken_from_the_advantage_of_its_token(estimator: str, on_policy: bool) -> None:
    case = draw(on_policy=on_policy)
    sampled = case.logprobs if case.proximal is None else case.proximal
    shaped = case.advantages - 0.3 * oracle.kl(estimator, sampled, case.reference)[0]

    terms, gradient, _ = objective_found(objective(estimator=estimator, where="reward"), case)

    np.testing.assert_allclose(terms, -shaped * case.logprobs, **EXACT)
    np.testing.assert_allclose(gradient, -shaped * case.weights, **EXACT)


def test_kl_to_go_is_taken_from_the_advantages_of_all_tokens_that_led_to_it() -> None:
    case = draw()
    assert case.proximal is not None
    penalty = oracle.to_go(case, oracle.kl("k1", case.proximal, case.reference)[0])
    shaped = case.advantages - 0.3 * penalty

    terms, gradient, _ = objective_found(objective(estimator="k1", where="reward_to_go"), case)

    np.testing.assert_allclose(terms, -shaped * case.logprobs, **EXACT)
    np.testing.assert_allclose(gradient, -shaped * case.weights, **EXACT)


def test_on_policy_k1_in_the_reward_of_a_token_is_k2_in_the_loss() -> None:
    case = draw(on_policy=True)

    by_reward = objective_found(objective(estimator="k1", where="reward"), case)
    by_loss = objective_found(objective(estimator="k2"), case)

    np.testing.assert_allclose(by_reward[1], by_loss[1], **EXACT)


@each_estimator
def test_the_metric_is_k3_without_a_bound_whatever_the_loss_uses(estimator: KLEstimator) -> None:
    case = draw(spread=12.0)
    d = case.reference - case.logprobs

    shown = means(objective(estimator=estimator).sums(scores_of(case), tokens_of(case)))

    assert (np.abs(d) > 20).any()
    assert shown["kl"] == pytest.approx(np.mean(np.exp(d) - d - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(0.1, 1.0), (0.11, 1 + 0.1 * 0.05), (0.5, 1 + 0.2 * 0.05), (0.0, 1 - 0.2 * 0.05), (math.inf, 1 + 0.2 * 0.05)],
)
def test_the_coefficient_follows_the_measured_kl_within_bounds(measured: float, factor: float) -> None:
    config = KLConfig(coefficient=0.05, target=0.1, horizon=10_000)

    assert next_kl_coefficient(config, 0.04, measured, completions=500) == pytest.approx(0.04 * factor, rel=1e-12)


def test_the_coefficient_stays_without_a_target_or_a_measurement() -> None:
    fixed, adaptive = KLConfig(coefficient=0.05), KLConfig(coefficient=0.05, target=0.1)

    assert next_kl_coefficient(fixed, 0.05, 3.0, completions=500) == 0.05
    assert next_kl_coefficient(adaptive, 0.05, math.nan, completions=500) == 0.05
