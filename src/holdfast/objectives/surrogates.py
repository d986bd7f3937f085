"""What stands in for the expected reward: a term per token whose gradient is a policy gradient.

A surrogate sees only advantages and ratios of the trainer's own policies. KL, entropy and the correction for the
sampler are added by `PolicyGradient`, so a surrogate of a user's own gets them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, ratio
from holdfast.objectives.ratios import bounded_exp


class Actions(NamedTuple):
    """Scored tokens as actions of the policy."""

    logprobs: Tensor
    """[N], differentiable while terms are formed"""
    log_ratio: Tensor
    """[N] log policy - log proximal policy, in nats; exactly 0, with gradient 1, in the first update of a rollout"""
    advantages: Tensor
    """[N]"""
    tokens: Tokens


class Surrogate(Protocol):
    """A policy-gradient loss without its regularisers."""

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a token's term depends on other tokens of its sequence."""
        ...

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms to be minimised, unweighted."""
        ...

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return detached metrics as [2] tensors (total, denominator); the same names for every batch."""
        ...


@dataclass(frozen=True)
class Reinforce:
    """-A log policy, without a ratio.

    Williams (1992), "Simple statistical gradient-following algorithms". In the second and later updates of a rollout
    the gradient is biased, since nothing says that another policy sampled.
    """

    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        return -actions.advantages * actions.logprobs

    def sums(self, actions: Actions) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: there is no bound to count."""
        return {}


@dataclass(frozen=True)
class CISPO:
    """-sg(clip(r, 1 - low, 1 + high)) A log policy: the weight is bounded, the gradient of no token is cut.

    MiniMax-M1 (arXiv:2506.13585), eqs. 4 and 5; sg is the stopped gradient. Bounds are relative to the ratio 1, so a
    token of the sampling policy always has weight 1; ScaleRL (arXiv:2510.13786) and TRL write the absolute 1 + high.
    """

    low: float = 1.0
    high: float = 4.0
    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms; the gradient of each is -weight A."""
        weights = bounded_exp(actions.log_ratio.detach()).clamp(1 - self.low, 1 + self.high)
        return -weights * actions.advantages * actions.logprobs

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the share of tokens at either bound, whatever the sign of their advantage."""
        ratios = bounded_exp(actions.log_ratio)
        return clip_sums(ratios < 1 - self.low, ratios > 1 + self.high)


@dataclass(frozen=True)
class SAPO:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a gate that is as steep as the ratio at 1 and closes smoothly on both sides.

    Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347), section 3. tau is `tau_positive` where A > 0
    and `tau_negative` elsewhere.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        positive, negative = (actions.advantages.new_tensor(tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(actions.advantages > 0, positive, negative)
        gate = torch.sigmoid(tau * (bounded_exp(actions.log_ratio) - 1)) * 4 / tau
        return -gate * actions.advantages

    def sums(self, actions: Actions) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: there is no bound to count."""
        return {}


def clip_sums(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return the shares of tokens that are clipped from below, from above, and at all; both masks are [N] bool."""
    tokens = float(low.numel())
    return {
        "clip_ratio/low_mean": ratio(low.sum(), tokens),
        "clip_ratio/high_mean": ratio(high.sum(), tokens),
        "clip_ratio/region_mean": ratio((low | high).sum(), tokens),
    }
