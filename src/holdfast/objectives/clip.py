"""Clipped surrogates: the gradient of a ratio ends where it has moved far enough in the direction of its advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import ratio
from holdfast.objectives.ratios import bounded_exp, sequence_mean
from holdfast.objectives.surrogates import Actions, clip_sums


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
class GSPO:
    """-min(s A, clip(s) A) with s = exp(mean over the sequence of log r): one ratio for all tokens of a sequence.

    Zheng et al. (arXiv:2507.18071), eqs. 5 and 7. Each token carries its sequence's term, so the paper's loss is its
    `sequence_mean`; under another average long sequences weigh more. Needs whole sequences, hence the head's form that
    computes chunks again.

    The mean of log r is held within +-20 nats, as every log ratio here is: beyond it s is e^20 or e^-20, and the
    gradient is 0.
    """

    low: float = 3e-4
    high: float = 4e-4
    needs_whole_sequences: bool = True

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms, equal within a sequence whose advantage is."""
        ratios = bounded_exp(sequence_mean(actions.log_ratio, actions.tokens))
        return clipped(ratios, actions.advantages, self.low, self.high)

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares, in tokens."""
        ratios = bounded_exp(sequence_mean(actions.log_ratio, actions.tokens))
        return count_clipped(ratios, actions.advantages, self.low, self.high)


@dataclass(frozen=True)
class GSPOToken:
    """GSPO's value with token gradients: the ratio is sg(s) policy / sg(policy).

    Zheng et al. (arXiv:2507.18071), eqs. 13 and 14. With one advantage per sequence its `sequence_mean` has the
    gradient of GSPO; with advantages that differ between tokens it weights each token by its own. Its bound is GSPO's:
    where the mean of log r lies beyond +-20 nats, the ratio is e^20 or e^-20, and the gradient is 0.
    """

    low: float = 3e-4
    high: float = 4e-4
    needs_whole_sequences: bool = True

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        of_sequence = sequence_mean(actions.log_ratio.detach(), actions.tokens)
        # A sum, and bounded as one: a factor of its own would bring the gradient of a bounded ratio back.
        own = actions.logprobs - actions.logprobs.detach()
        return clipped(bounded_exp(of_sequence + own), actions.advantages, self.low, self.high)

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares, in tokens."""
        return GSPO(self.low, self.high).sums(actions)
