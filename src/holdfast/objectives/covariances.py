"""Which tokens lower the entropy of a policy most, told before an update by the covariance that drives it.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617): the
covariance of a token is (log p - mean log p) (A - mean A) over the N tokens of an update. Clip-Cov leaves a random few
of those with a high one out of the loss; KL-Cov holds the highest near the policy before. There N and the means are of
a micro-batch and log p is the present policy's; here they are of the whole update, over all ranks, and log p is that of
the proximal policy, so that no split changes which tokens are chosen.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
"""[N], one number per trained token of an update"""
Chosen = NDArray[np.bool_]


def covariances(logprobs: Numbers, advantages: Numbers) -> Numbers:
    """Return each token's covariance, [N]; the means are exact, whatever the order of the tokens."""
    return _centred(logprobs) * _centred(advantages)


def _centred(values: Numbers) -> Numbers:
    return values - math.fsum(values) / max(values.size, 1)


def some_between(values: Numbers, priorities: Numbers, share: float, low: float, high: float) -> Chosen:
    """Return [N]: of the tokens with a value strictly between two bounds, those of lowest priority.

    Args:
        values: Covariances.
        priorities: Drawn at random, all different.
        share: Of all N tokens, those that are chosen: rounded down, and at least one if any lies between.
        low: Lower bound.
        high: Upper bound.
    """
    between: Chosen = (values > low) & (values < high)
    count = min(max(int(share * values.size), 1), int(between.sum()))
    if not count:
        return between
    last = np.partition(priorities[between], count - 1)[count - 1]
    chosen: Chosen = between & (priorities <= last)
    return chosen


def highest(values: Numbers, share: float) -> Chosen:
    """Return [N]: the tokens of the highest values, a share of all rounded down, at least one; ties stay together."""
    if not values.size:
        return np.zeros(0, dtype=np.bool_)
    place = values.size - max(int(share * values.size), 1)
    chosen: Chosen = values >= np.partition(values, place)[place]
    return chosen
