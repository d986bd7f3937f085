"""Variational sequence-level soft policy optimization, as a loss of one's own.

Shen et al., "VESPO" (arXiv:2602.10693): REINFORCE, with a weight per sequence that falls off smoothly on both sides of
the ratio 1 and knows no length normalisation. Use it with

    objective: {kind: path, path: losses/vespo.py:vespo}
    data: {average: token_mean}

Deviations: the ratio is that of policy and proximal policy; against the sampler use the `correction` of the objective.
The authors' code bounds the ratio to [1e-8, e^20]; here nothing overflows without a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import ratio, sequence_sum
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Actions


@dataclass(frozen=True)
class VESPO:
    """-sg(phi(w)) A log policy, where phi(w) = w^k exp(lambda (1 - w)) and w is the product of the sequence's ratios.

    phi(1) = 1, so the first update of a rollout is REINFORCE. k and lambda depend on the sign of the advantage.
    """

    k: tuple[float, float]
    """For advantages from 0 up, and below."""
    rate: tuple[float, float]
    """lambda, likewise."""
    needs_whole_sequences: bool = True

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms; the gradient of each is -phi A."""
        return -self._weights(actions) * actions.advantages * actions.logprobs

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the mean weight over tokens."""
        weights = self._weights(actions)
        return {"vespo/phi_seq_mean": ratio(weights.sum(), float(weights.numel()))}

    def _weights(self, actions: Actions) -> Tensor:
        log_ratio = sequence_sum(actions.log_ratio.detach(), actions.tokens)
        k, rate = (by_sign(actions.advantages, *pair) for pair in (self.k, self.rate))
        # No bound is needed: where exp overflows, the outer one is 0.
        return (rate + k * log_ratio - rate * log_ratio.exp()).exp()


def by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return [N] one number where an advantage is at least 0, the other elsewhere."""
    return torch.where(advantages >= 0, advantages.new_tensor(positive), advantages.new_tensor(negative))


def vespo(
    k_positive: float = 2.0, rate_positive: float = 3.0, k_negative: float = 3.0, rate_negative: float = 2.0
) -> PolicyGradient:
    """Return the loss."""
    return PolicyGradient(VESPO((k_positive, k_negative), (rate_positive, rate_negative)))
