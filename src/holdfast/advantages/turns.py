"""Advantages of the turns of episodes: each by its own discounted return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.advantages.group import advantages
from holdfast.config.sections.advantage import AdvantageConfig

TurnMatrix = NDArray[np.float64]
"""[P, G, T]: T turns of each of G episodes of each of P prompts; NaN where an episode has no such turn"""


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return of every turn the sum of the rewards from it on: R_t = r_t + discount R_(t+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(config: AdvantageConfig, returns: TurnMatrix) -> TurnMatrix:
    """Return the advantage of every turn, [P, G, T]; 0 where an episode has no such turn.

    Normalised discounted returns of turns are advantages in Ding et al., "Empowering Multi-Turn Tool-Integrated
    Reasoning with Group Turn Policy Optimization" (arXiv:2511.14846). Turn t is compared with turn t of the other
    episodes of its group that have one, by the formula of `config`; for grpo

        A_it = (R_it - mean of R_jt over j) / (standard deviation of R_jt over j + epsilon)

    The paper's shaping of rewards is left out. A turn that a single episode of its group reached has nothing to be
    compared with, and the advantage 0. With all rewards at the end, discount 1, and episodes of one length, A_it is the
    advantage of the episode.

    Args:
        config: A formula that compares within groups.
        returns: [P, G, T]
    """
    by_turn = [advantages(config, returns[:, :, turn]) for turn in range(returns.shape[2])]
    return np.stack(by_turn, axis=2) if by_turn else np.zeros(returns.shape)
