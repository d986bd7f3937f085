"""PPO's advantages and value loss once more, in plain loops over sequences and tokens.

Nothing here is shared with the code it checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Return the advantages of one sequence by the sum that defines them: over l of (gamma lambda)^l delta_(t+l)."""
    deltas = [r + gamma * after - v for r, (v, after) in zip(rewards, pairwise([*values, 0.0]), strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


def whiten(sequences: Sequence[Sequence[float]], epsilon: float) -> list[list[float]]:
    """Return all tokens' numbers with mean 0 and deviation 1, one sequence at a time."""
    flat = [value for sequence in sequences for value in sequence]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    return [[(value - mean) / (deviation + epsilon) for value in sequence] for sequence in sequences]


def value_loss(value: float, before: float, target: float, clip: float | None) -> tuple[float, float]:
    """Return a token's loss, and its derivative by the value."""
    plain = (value - target) ** 2 / 2
    if clip is None:
        return plain, value - target
    bounded = (min(max(value, before - clip), before + clip) - target) ** 2 / 2
    if bounded > plain:  # then the bound holds: inside it both are the same number
        return bounded, 0.0
    return plain, value - target


def explained_variance(returns: Sequence[float], values: Sequence[float]) -> float:
    """Return 1 - Var(R - V) / Var(R)."""

    def variance(numbers: list[float]) -> float:
        mean = math.fsum(numbers) / len(numbers)
        return math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)

    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(list(returns))
