"""Supervised losses: likelihood, and likelihood weighted by the policy's own confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, ratio
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
