"""Advantages of tokens, from a critic's values: pure functions of the tokens that a policy chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
"""[N], one number per chosen token"""
T = TypeVar("T")
Gather = Callable[[T], Sequence[T]]
"""Returns what every rank gave."""


def generalised_advantages(
    rewards: Values, values: Values, sequence: NDArray[np.int64], gamma: float, lam: float
) -> Values:
    """Return [N] advantages: A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv:1506.02438),
    eq. 16. After a sequence's last token there is nothing: value and advantage are 0. Tokens between, which the policy
    did not choose, are not given and take no time.

    Args:
        rewards: [N]
        values: [N], each before its token is chosen.
        sequence: [N], which sequence a token belongs to; a sequence's tokens stand in their order.
        gamma: Discount.
        lam: The paper's lambda.
    """
    if not rewards.size:
        return np.zeros(0)
    order = np.argsort(sequence, kind="stable")
    _, row, lengths = np.unique(sequence[order], return_inverse=True, return_counts=True)
    column = np.arange(order.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    reward, value, advantage = np.zeros((3, lengths.size, int(lengths.max()) + 1))
    reward[row, column], value[row, column] = rewards[order], values[order]
    for t in range(advantage.shape[1] - 2, -1, -1):
        # Past a row's end rewards and values are 0, and so is what comes from there.
        advantage[:, t] = reward[:, t] + gamma * value[:, t + 1] - value[:, t] + gamma * lam * advantage[:, t + 1]
    result = np.empty(order.size)
    result[order] = advantage[row, column]
    return result


_ROUNDING = 1e-12
"""Relative deviation of numbers that are alike but for the last digits of their mean in float64."""


class Spread(NamedTuple):
    """Mean and variance of numbers that several ranks hold parts of."""

    mean: float
    variance: float
    """Of a sample (divided by n - 1); 0 of fewer than two."""

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)


def spread_of(numbers: Values, gather: Gather[tuple[int, float]]) -> Spread:
    """Return mean and variance over all ranks, in two passes; all ranks call this together."""
    parts = gather((numbers.size, math.fsum(numbers)))
    count = sum(size for size, _ in parts)
    mean = math.fsum(total for _, total in parts) / max(count, 1)
    squares = gather((numbers.size, math.fsum((numbers - mean) ** 2)))
    return Spread(mean, math.fsum(total for _, total in squares) / max(count - 1, 1))


def whitened(advantages: Values, spread: Spread, epsilon: float) -> Values:
    """Return (A - mean) / (standard deviation + epsilon); one token, or tokens that are all alike, give 0."""
    if spread.deviation <= _ROUNDING * max(1.0, abs(spread.mean)):
        return np.zeros_like(advantages)
    return (advantages - spread.mean) / (spread.deviation + epsilon)


def explained_variance(returns: Spread, errors: Spread) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 where values are right, 0 where they say no more than a constant would.

    None where all returns are alike.
    """
    return 1 - errors.variance / returns.variance if returns.variance > 0 else None
