"""Surrogates of the expected reward: terms per token whose gradient is a policy gradient.

A surrogate receives only advantages and the trainer's log-probabilities. `PolicyGradient` adds KL, entropy and the
correction for the sampler, also to a surrogate that a user wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, bounded_exp, carried, ratio, sequence_mean

COVARIANCE_MASK = "covariance_mask"
"""Column that says which tokens were selected by their covariance."""


class Actions(NamedTuple):
    """The scored tokens as actions of the policy."""

    logprobs: Tensor
    """[N] log-probabilities under the policy, in nats; differentiable while terms are formed"""
    log_ratio: Tensor
    """[N] log policy - log proximal policy, in nats; exactly 0, with gradient 1, in the first update of a rollout"""
    advantages: Tensor
    """[N] advantage of each token, a constant of the update"""
    tokens: Tokens
    """Weights, columns and sequences of the same tokens."""


class Surrogate(Protocol):
    """The protocol of a surrogate: a policy-gradient loss without its regularisers."""

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a token's term depends on other tokens of its sequence."""

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms to be minimised, unweighted.

        Args:
            actions: Scored tokens: all of a micro-batch if `needs_whole_sequences`, else any chunk of them.
        """

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return detached metrics as [2] tensors (total, denominator); the same names for every batch.

        Args:
            actions: All scored tokens of a micro-batch.
        """


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
class DPPO:
    """-sg(min(r, cap)) A log policy, for tokens that the update may still move; 0 for the others.

    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879): divergence PPO with the
    binary approximation, whose gradient is that of M r A with a mask M; the form with a stopped, capped ratio is verl's
    (dppo_tv, dppo_kl). With p the token's probability under the policy and q under the proximal one, M is 0 where p
    went the way its advantage asks for and the divergence of (p, 1 - p) from (q, 1 - q) exceeds the bound of that side:
    |p - q| for tv, KL(q, p) for kl. The paper compares with the policy that sampled; here a correction does that.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: float = 0.15
    high: float = 0.15
    cap: float = 20.0
    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        low, high = self._beyond(actions)
        weights = torch.where(low | high, 0.0, bounded_exp(actions.log_ratio.detach()).clamp(max=self.cap))
        return -weights * actions.advantages * actions.logprobs

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the shares of tokens beyond either bound."""
        return clip_sums(*self._beyond(actions))

    def _beyond(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """Return [N] bool: tokens that fell too far, and tokens that rose too far, in the way of their advantages."""
        new = actions.logprobs.detach()
        old = new - actions.log_ratio.detach()
        p, q = new.exp(), old.exp()
        if self.divergence == "tv":
            moved = (p - q).abs()
        else:
            # Where a probability is 1 in floating point, nothing but its own digits is left of the other outcome.
            complements = [(-torch.expm1(value)).clamp(min=torch.finfo(value.dtype).eps) for value in (old, new)]
            moved = q * (old - new) + complements[0] * (complements[0].log() - complements[1].log())
        return (moved > self.low) & (p < q) & (actions.advantages <= 0), (moved > self.high) & (p > q) & (
            actions.advantages > 0
        )


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
    """Return the shares of tokens that are clipped from below, from above, and at all.

    Args:
        low: [N] bool, whether a token's ratio is clipped at the lower bound.
        high: [N] bool, whether it is clipped at the upper bound.
    """
    tokens = float(low.numel())
    return {
        "clip_ratio/low_mean": ratio(low.sum(), tokens),
        "clip_ratio/high_mean": ratio(high.sum(), tokens),
        "clip_ratio/region_mean": ratio((low | high).sum(), tokens),
    }


def clipped(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), [N]; the pessimistic one of the two.

    Schulman et al., PPO (arXiv:1707.06347), eq. 7; one bound per side as in DAPO (arXiv:2503.14476), eq. 10.
    """
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def count_clipped(ratios: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Return the shares of tokens whose gradient the clip ends, counted by the sign of the advantage."""
    return clip_sums((ratios < 1 - low) & (advantages < 0), (ratios > 1 + high) & (advantages > 0))


@dataclass(frozen=True)
class Clip:
    """PPO's surrogate per token; with group advantages that of GRPO.

    GRPO (arXiv:2402.03300), eq. 3, and DAPO (arXiv:2503.14476), eq. 8, which differ by their average and bounds. Where
    A < 0 the ratio is unbounded from above; `ceiling` bounds the term by -ceiling A there: the dual clip of Ye et al.
    (arXiv:1912.09729, dual-clip PPO) and the delta of INTELLECT-2 (arXiv:2505.07291, two-sided clipping); for A < 0
    the two are one formula, since delta lies above 1 + high.
    """

    low: float = 0.2
    high: float = 0.2
    ceiling: float | None = None
    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        terms = clipped(bounded_exp(actions.log_ratio), actions.advantages, self.low, self.high)
        if self.ceiling is None:
            return terms
        bound = -self.ceiling * actions.advantages
        return torch.where(actions.advantages < 0, torch.minimum(terms, bound), terms)

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares; with a ceiling also the share of tokens beyond it."""
        ratios, advantages = bounded_exp(actions.log_ratio), actions.advantages
        sums = count_clipped(ratios, advantages, self.low, self.high)
        if self.ceiling is not None:
            beyond = (ratios > self.ceiling) & (advantages < 0)
            sums["clip_ratio/dual_mean"] = ratio(beyond.sum(), float(beyond.numel()))
        return sums


@dataclass(frozen=True)
class ClipCov(Clip):
    """PPO's surrogate, 0 for the tokens that were chosen by their covariance.

    Cui et al. (arXiv:2505.22617), Clip-Cov; `objectives/policy.py` chooses. A token that is chosen counts as one,
    whether the ratio clips it besides or not.
    """

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        return torch.where(_selected_tokens(actions), 0.0, super().terms(actions))

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares, and the share of tokens that were chosen."""
        return super().sums(actions) | _share_of_selected(actions)


@dataclass(frozen=True)
class KLCov:
    """-r A, and coefficient |log r| for the tokens that were chosen by their covariance.

    Cui et al. (arXiv:2505.22617), KL-Cov, with the penalty of their code, which is 0 in the first update of a rollout.
    """

    coefficient: float = 1.0
    needs_whole_sequences: bool = False

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        penalty = torch.where(_selected_tokens(actions), self.coefficient * actions.log_ratio.abs(), 0.0)
        return penalty - bounded_exp(actions.log_ratio) * actions.advantages

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the share of tokens that were chosen."""
        return _share_of_selected(actions)


def _selected_tokens(actions: Actions) -> Tensor:
    return carried(COVARIANCE_MASK, actions.logprobs, actions.tokens) > 0


def _share_of_selected(actions: Actions) -> dict[str, Tensor]:
    selected = _selected_tokens(actions)
    return {"covariance/chosen_mean": ratio(selected.sum(), float(selected.numel()))}


@dataclass(frozen=True)
class GSPO:
    """The surrogate of GSPO, with one ratio for all tokens of a sequence.

    It is -min(s A, clip(s) A) with s = exp(mean over the sequence of log r): Zheng et al. (arXiv:2507.18071), eqs. 5
    and 7. Each token carries its sequence's term, so the paper's loss is its `sequence_mean`; under another average
    long sequences weigh more. Needs whole sequences, hence the head's form that computes chunks again.

    The mean of log r is held within +-20 nats, as every log ratio here is: beyond it s is e^20 or e^-20, and the
    gradient is 0.
    """

    low: float = 3e-4
    """Distance of the lower bound of s below 1."""
    high: float = 4e-4
    """Distance of the upper bound of s above 1."""
    needs_whole_sequences: bool = True
    """As in `Surrogate`."""

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms, equal within a sequence whose advantage is."""
        ratios = bounded_exp(sequence_mean(actions.log_ratio, actions.tokens))
        return clipped(ratios, actions.advantages, self.low, self.high)

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares, in tokens."""
        ratios = bounded_exp(sequence_mean(actions.log_ratio, actions.tokens))
        return count_clipped(ratios, actions.advantages, self.low, self.high)


@dataclass(frozen=True)
class GSPOToken(GSPO):
    """GSPO's value with token gradients: the ratio is sg(s) policy / sg(policy).

    Zheng et al. (arXiv:2507.18071), eqs. 13 and 14. With one advantage per sequence its `sequence_mean` has the
    gradient of GSPO; with advantages that differ between tokens it weights each token by its own. Its bound is GSPO's:
    where the mean of log r lies beyond +-20 nats, the ratio is e^20 or e^-20, and the gradient is 0.
    """

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        of_sequence = sequence_mean(actions.log_ratio.detach(), actions.tokens)
        # A sum, and bounded as one: a factor of its own would bring the gradient of a bounded ratio back.
        zero_with_gradient = actions.logprobs - actions.logprobs.detach()
        return clipped(bounded_exp(of_sequence + zero_with_gradient), actions.advantages, self.low, self.high)
