"""The loss of a run on preferences: losses of pairs with their weights, or KTO's of single answers.

Both sum over whole answers, so no chunk of tokens can be judged alone. A pair's loss stands at the first trained token
of its chosen answer, and the terms of all other tokens are 0. With weight 1 and one count per pair their sum is the
mean over pairs, however these were split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, ratio
from holdfast.objectives.pairs import Answers, PairLoss, Pairs, answers_of, at_first_tokens, of_sequences
from holdfast.types import Scores


class WeightedLoss(NamedTuple):
    """One of several losses."""

    name: str
    weight: float
    loss: PairLoss


@dataclass(frozen=True)
class PairedPreference:
    """Losses of pairs, and the likelihood of what was chosen.

    Sequences come in twos, the chosen one first. Of `tokens.per_token` it reads `reference_logprobs` if
    `needs_reference`.
    """

    losses: Sequence[WeightedLoss]
    """Metrics show the rewards of the first."""
    sft: float = 0.0
    """Weight of the chosen answer's mean negative log-likelihood (RPO, arXiv:2404.19733, eq. 1)."""
    needs_reference: bool = True
    separable: bool = False
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [N] terms: the loss of each pair, once."""
        pairs = self._pairs(logprobs, tokens)
        total = sum(
            (term.weight * term.loss.losses(pairs) for term in self.losses), -self.sft * pairs.chosen.mean_logps
        )
        return at_first_tokens(total, tokens, step=2)

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return metrics, each a mean over pairs:

        - rewards/chosen, rewards/rejected, rewards/margins: as the first loss implies them.
        - rewards/accuracies: the share of pairs whose chosen answer has the higher reward.
        - logps/chosen, logps/rejected: log-probabilities of answers.
        - nll_loss: mean negative log-likelihood of the chosen answer's tokens.
        - loss/NAME: each of several losses, unweighted.
        - entropy: in nats, over trained tokens, where it was computed.
        """
        pairs = self._pairs(scores.values, tokens)
        count = float(pairs.chosen.logps.numel())
        chosen, rejected = (self.losses[0].loss.rewards(side) for side in pairs)
        means = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).to(torch.float64),
            "logps/chosen": pairs.chosen.logps,
            "logps/rejected": pairs.rejected.logps,
            "nll_loss": -pairs.chosen.mean_logps,
        }
        if len(self.losses) > 1:
            means |= {f"loss/{term.name}": term.loss.losses(pairs) for term in self.losses}
        return {name: ratio(values.sum(), count) for name, values in means.items()} | _entropy(scores)

    def _pairs(self, logprobs: Tensor, tokens: Tokens) -> Pairs:
        answers = answers_of(logprobs, tokens, compared=self.needs_reference)
        return Pairs(answers.every(2), answers.every(2, first=1))


class PairedScores(PairedPreference):
    """As `PairedPreference`, of a reward model: an answer has a score, and no likelihood."""

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the metrics of `PairedPreference` that speak of rewards."""
        return {name: value for name, value in super().sums(scores, tokens).items() if name.startswith("rewards/")}


@dataclass(frozen=True)
class KTO:
    """Single answers, desirable or not, against the KL divergence z0 from the reference.

    Ethayarajh et al. (arXiv:2402.01306), section 4: weight (1 - sigmoid(beta (r - z0))) where desirable, else weight
    (1 - sigmoid(beta (z0 - r))). Of `tokens.per_token` it reads `reference_logprobs`; `desirable`, bool; and `kl`, z0,
    which all tokens of an update share: it is measured before the update's first forward pass, over all ranks.
    """

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    sft: float = 0.0
    """Weight of a desirable answer's mean negative log-likelihood."""
    separable: bool = False
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [N] terms: the loss of each answer, once."""
        answers = answers_of(logprobs, tokens, compared=True)
        desirable = of_sequences("desirable", tokens).to(torch.bool)
        away = answers.log_ratios - of_sequences("kl", tokens)
        losses = torch.where(
            desirable,
            self.desirable_weight * torch.sigmoid(-self.beta * away) - self.sft * answers.mean_logps,
            self.undesirable_weight * torch.sigmoid(self.beta * away),
        )
        return at_first_tokens(losses, tokens)

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return metrics, over desirable answers (chosen) and the others (rejected):

        - rewards/chosen, rewards/rejected, logps/chosen, logps/rejected: as for pairs.
        - rewards/accuracies: the share of answers on their side of z0.
        - kto/kl: z0, in nats per answer.
        - kto/desirable: the share of desirable answers.
        """
        answers = answers_of(scores.logprobs, tokens, compared=True)
        desirable, kl = of_sequences("desirable", tokens).to(torch.bool), of_sequences("kl", tokens)
        count = float(answers.logps.numel())
        right = (answers.log_ratios > kl) == desirable
        metrics = {
            "rewards/accuracies": ratio(right.sum(), count),
            "kto/kl": ratio(kl.sum(), count),
            "kto/desirable": ratio(desirable.sum(), count),
        }
        return metrics | self._by_side(answers, desirable) | _entropy(scores)

    def _by_side(self, answers: Answers, desirable: Tensor) -> dict[str, Tensor]:
        metrics = {}
        for name, side in {"chosen": desirable, "rejected": ~desirable}.items():
            metrics[f"rewards/{name}"] = ratio((self.beta * answers.log_ratios * side).sum(), side.sum())
            metrics[f"logps/{name}"] = ratio((answers.logps * side).sum(), side.sum())
        return metrics


def _entropy(scores: Scores) -> dict[str, Tensor]:
    if scores.entropy is None:
        return {}
    return {"entropy": ratio(scores.entropy.sum(dtype=torch.float64), float(scores.values.numel()))}
