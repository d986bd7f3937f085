"""Several rewards as one. A completion that could not be scored stays unscored; it never becomes a reward of 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""[P, G]: G completions of each of P prompts; NaN where a completion was not scored"""


def total_rewards(parts: Mapping[str, Rewards], weights: Mapping[str, float]) -> Rewards:
    """Return the weighted sum of named rewards, [P, G].

    A reward that scored no completion of a prompt does not apply to it and is left out there, as when rows of several
    tasks are mixed. A completion that lacks a reward which others of its prompt have cannot be compared with them: its
    sum is NaN.

    Args:
        parts: By name, [P, G] each; at least one.
        weights: By name; 1 where none is given.
    """
    scored = comparable(parts)
    total = sum(weights.get(name, 1.0) * np.nan_to_num(part) for name, part in finite(parts).items())
    return np.where(scored, total, np.nan)


def comparable(parts: Mapping[str, Rewards]) -> NDArray[np.bool_]:
    """Return [P, G]: whether a completion has every reward that any completion of its prompt has, and at least one."""
    scored = np.stack([np.isfinite(part) for part in parts.values()])
    applies = scored.any(axis=2, keepdims=True)
    whole: NDArray[np.bool_] = np.logical_and.reduce(scored | ~applies) & np.logical_or.reduce(applies)
    return whole


def finite(parts: Mapping[str, Rewards]) -> dict[str, Rewards]:
    """Return the rewards with NaN for whatever is not a finite number."""
    return {name: np.where(np.isfinite(part), part, np.nan) for name, part in parts.items()}
