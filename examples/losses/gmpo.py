"""Geometric-mean policy optimization, as a loss of one's own.

Zhao et al., "Geometric-Mean Policy Optimization" (arXiv:2507.20673): the objective of a completion is the geometric
mean of its tokens' ratios, each clipped before the mean, so that one outlier does not carry the update. Use it with

    objective: {kind: path, path: losses/gmpo.py:gmpo}
    data: {average: sequence_mean}
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import bounded_exp, sequence_mean
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Actions, clip_sums


@dataclass(frozen=True)
class GMPO:
    """-A exp(mean over the sequence of the clipped log r), in every token of the sequence.

    A log ratio is clipped to [-low, high] only on the side its advantage rewards, as PPO clips ratios; the paper's
    range is (e^-0.4, e^0.4). Where advantages differ within a sequence each token carries its own.
    """

    low: float
    high: float
    needs_whole_sequences: bool = True

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        clipped = actions.log_ratio.clamp(-self.low, self.high)
        pessimistic = torch.where(
            actions.advantages >= 0,
            torch.minimum(actions.log_ratio, clipped),
            torch.maximum(actions.log_ratio, clipped),
        )
        return -actions.advantages * bounded_exp(sequence_mean(pessimistic, actions.tokens))

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares."""
        log_ratio, advantages = actions.log_ratio, actions.advantages
        return clip_sums((log_ratio < -self.low) & (advantages < 0), (log_ratio > self.high) & (advantages > 0))


def gmpo(low: float = 0.4, high: float = 0.4) -> PolicyGradient:
    """Return the loss. The bounds are those of a token's log ratio, in nats."""
    return PolicyGradient(GMPO(low, high))
