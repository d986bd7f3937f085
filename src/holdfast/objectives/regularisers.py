"""KL and entropy regularisation of a policy: estimators, loss terms, and controllers of their coefficients.

In KL throughout d = log reference - log policy, so that estimates are of KL(policy || reference) in nats per token,
from tokens that the policy sampled. Schulman (2020), "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import huber_loss

from holdfast.config.sections.policy import EntropyConfig, KLConfig, KLEstimator
from holdfast.objectives.base import LIMIT, Tokens, bounded_exp, sum_to_go

_STEEPEST = 2.6108686381498756
"""Where k3 turns into a line, in nats of d: its value is 10 there. One token of probability 0 must not outweigh a
batch, and exp(d) would. Beyond, k3 is too small, which is the one bias of the importance-weighted k3."""


def kl_estimate(estimator: KLEstimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return [N] estimates of the KL divergence, differentiable in `logprobs`.

    Where an estimate is steep it goes on as a line, with the value and the slope that it has there: k2 beyond d = +-20,
    k3 beyond d = 2.61. So no gradient is larger than 20, and none becomes 0 where the policy is furthest away. k1 and
    abs are lines everywhere.

    Gradients, on tokens of the policy itself: k2 and straight_through have that of the KL divergence; k3 lacks the
    score term; that of k1 is 0 on average (arXiv:2512.21852).
    """
    d = reference - logprobs
    match estimator:
        case "k1":
            return -d
        case "k2":
            return huber_loss(logprobs, reference, reduction="none", delta=LIMIT)
        case "k3":
            bounded = d.clamp(max=_STEEPEST)
            return bounded.exp() - bounded - 1 + math.expm1(_STEEPEST) * (d - bounded)
        case "abs":
            return d.abs()
        case "straight_through":
            gradient = kl_estimate("k2", logprobs, reference)
            return gradient - gradient.detach() + kl_estimate("k3", logprobs, reference).detach()


def kl_terms(config: KLConfig, logprobs: Tensor, reference: Tensor, log_ratio: Tensor) -> Tensor:
    """Return [N] terms of the loss, without the coefficient.

    `importance_weighted` multiplies by r = policy / proximal policy (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).
    Estimators whose gradient lacks the score term (k1, k3, abs) get it from the gradient of r; k2 and straight_through
    have it, so their r is a constant.
    """
    estimate = kl_estimate(config.estimator, logprobs, reference)
    if not config.importance_weighted:
        return estimate
    if config.estimator in {"k2", "straight_through"}:
        return bounded_exp(log_ratio.detach()) * estimate
    return bounded_exp(log_ratio) * estimate


def shaped_advantages(
    config: KLConfig, coefficient: float, advantages: Tensor, proximal: Tensor, reference: Tensor, tokens: Tokens
) -> Tensor:
    """Return [N] advantages less coefficient x KL, detached: the KL divergence as a negative reward.

    The KL is that of the proximal policy, the trainer's view of who sampled, so it is the same in every update of a
    rollout. It enters after the task reward was compared within its group, as in REINFORCE++ (arXiv:2501.03262), and
    moves no baseline. `reward` charges a token with its own KL: on the first update k1 is then k2 in the loss, up to
    20 nats.
    `reward_to_go` charges it with that of all it leads to, which is the policy gradient of the sequence's KL.
    """
    penalty = kl_estimate(config.estimator, proximal.detach(), reference.detach())
    if config.where == "reward_to_go":
        penalty = sum_to_go(penalty, tokens)
    return (advantages - coefficient * penalty).detach()


def kl_total(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the sum over tokens of k3, [] float64: unbounded, so that a metric hides nothing, and never negative."""
    d = (reference - logprobs).detach().to(torch.float64)
    return (d.exp() - d - 1).sum()


def next_kl_coefficient(config: KLConfig, coefficient: float, measured: float, completions: int) -> float:
    """Return the coefficient after a step that measured a KL per token.

    Ziegler et al. (arXiv:1909.08593), section 2.2, with the horizon of their code: multiplied by
    1 + clip((measured - target) / target, +-0.2) completions / horizon. They measure per sequence, here it is per
    token, which does not depend on length. Without a target, or with a measurement that is not a number, nothing
    changes.
    """
    if config.target is None or math.isnan(measured):
        return coefficient
    error = min(max(measured / config.target - 1, -0.2), 0.2)
    # More completions than a few horizons would turn the coefficient negative, and it would never come back.
    return coefficient * min(max(1 + error * completions / config.horizon, 0.5), 2.0)


def entropy_threshold(entropies: NDArray[np.floating], top_quantile: float) -> float:
    """Return the smallest entropy that is still trained: at least `top_quantile` of all tokens reach it.

    Wang et al., "Beyond the 80/20 Rule" (arXiv:2506.01939), section 5.1. The paper takes the quantile over a
    micro-batch; given the tokens of a whole update over all ranks, it depends on no split. Tokens of the same entropy
    stay together, so ties may train more. The denominator of the loss still counts every token, as in the paper.

    Args:
        entropies: [M] in nats, of every trained token.
        top_quantile: Share to train, in (0, 1].
    """
    if entropies.size == 0:
        return -math.inf
    # 0.07 * 100 is a little more than 7 in floating point, and must not become 8.
    trained = max(1, math.ceil(round(top_quantile * entropies.size, 9)))
    index = entropies.size - trained
    return float(np.partition(entropies.ravel(), index)[index])


def next_entropy_coefficient(config: EntropyConfig, coefficient: float, measured: float) -> float:
    """Return the weight of the bonus after an update whose mean entropy was measured, in nats per token.

    Skywork-OR1 (arXiv:2505.22312), section 4: one step up below the target, one step down above it, within bounds.
    Without a target, or with a measurement that is not a number, nothing changes.
    """
    if config.target is None or math.isnan(measured):
        return coefficient
    moved = coefficient + (config.step if measured <= config.target else -config.step)
    return min(max(moved, config.lowest), config.highest)


def acting_entropy_coefficient(config: EntropyConfig, coefficient: float, measured: float | None) -> float:
    """Return the weight that acts in the next update: 0 while the last measured entropy is above the target.

    Skywork-OR1 (arXiv:2505.22312), section 4: alpha_k = c_k 1[e_k <= target]. Before the first measurement it acts.
    """
    above = config.target is not None and measured is not None and measured > config.target
    return 0.0 if above else coefficient
