"""Losses of single tokens: likelihood, likelihood weighted by the policy's own confidence, a critic's squared error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, carried, ratio
from holdfast.types import Scores


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-log p(token); its token_mean is the loss transformers computes."""

    separable: bool = True
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] negative log-probabilities, in nats."""
        return -logprobs

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return `nll`, the mean over trained tokens whatever the average of the loss is."""
        return supervised_sums(scores, tokens)


@dataclass(frozen=True)
class DynamicFineTuning(NegativeLogLikelihood):
    """-sg(p) log p: the gradient of -p, which stops rare tokens from dominating.

    Wu et al., "On the Generalization of SFT" (arXiv:2508.05629), eq. 9; sg is the stopped gradient.
    """

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] terms, each between 0 and 1/e."""
        return -logprobs.detach().exp() * logprobs


def supervised_sums(scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
    """Return nll, mean_token_accuracy and, where it was computed, entropy over trained tokens."""
    count = float(tokens.weights.numel())
    sums = {
        "nll": ratio(-scores.logprobs.sum(dtype=torch.float64), count),
        "mean_token_accuracy": ratio(scores.is_top.sum(), count),
    }
    if scores.entropy is not None:
        sums["entropy"] = ratio(scores.entropy.sum(dtype=torch.float64), count)
    return sums


@dataclass(frozen=True)
class ValueLoss:
    """1/2 max((v - R)^2, (clip(v, V - c, V + c) - R)^2), the policy's pessimism applied to values.

    The error is that of Schulman et al., "Proximal Policy Optimization" (arXiv:1707.06347), eq. 9; the bound is their
    code's. Of `tokens.per_token` it reads `returns` R and, with a bound, `values` V.

    Args:
        clip: c; None: no bound.
    """

    clip: float | None = None
    separable: bool = False
    """No head makes values, so there are no logits to go through in chunks."""
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] terms; `logprobs` are the critic's values."""
        plain, bounded = self._errors(logprobs, tokens)
        return torch.maximum(plain, bounded) / 2

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the share of values that the bound holds, where there is one."""
        if self.clip is None:
            return {}
        plain, bounded = self._errors(scores.logprobs, tokens)
        return {"clip_fraction": ratio((bounded > plain).sum(), float(plain.numel()))}

    def _errors(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return [n] squared errors of the values, and of the values within the bound."""
        returns = carried("returns", values, tokens)
        plain = (values - returns).square()
        if self.clip is None:
            return plain, plain
        before = carried("values", values, tokens)
        # Not before + clamp(values - before): within the bound that is the value but for rounding, which would count.
        return plain, (values.clamp(before - self.clip, before + self.clip) - returns).square()
