"""Entropy: the threshold above which tokens are trained, and the controller of the bonus."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.policy import EntropyConfig


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
    place = entropies.size - trained
    return float(np.partition(entropies.ravel(), place)[place])


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
