"""Losses that compare a chosen answer with a rejected one: a number per pair, differentiable.

Write r for an answer's `log_ratios`, log policy - log reference summed over its tokens, and m for its `mean_logps`.

Sums are float64. A log-probability of a thousand tokens has few digits left in float32, and losses take differences of
such sums; the difference to the reference is taken token by token, so that it is exactly 0 where both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from holdfast.config.sections.preference import BuiltInPairLoss, Lengths
from holdfast.objectives.base import Tokens


@dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch, [S] each, float64; differentiable in the policy's log-probabilities."""

    logps: Tensor
    """Log-probability of the answer under the policy: the sum over its trained tokens."""
    log_ratios: Tensor
    """`logps` less those under the reference; `logps` alone without a reference."""
    lengths: Tensor
    """Number of trained tokens of the answer."""

    @property
    def mean_logps(self) -> Tensor:
        """Log-probability per token: the logarithm of the geometric mean of the tokens' probabilities."""
        return self.logps / self.lengths

    @property
    def scores(self) -> Tensor:
        """Scores of a reward model, which has one scored token in an answer and no log-probabilities."""
        return self.logps

    def every(self, step: int, first: int = 0) -> Answers:
        """Return the answers first, first + step, first + 2 step and so on.

        Args:
            step: Distance between two answers.
            first: Index of the first answer. Default: 0.
        """
        return Answers(self.logps[first::step], self.log_ratios[first::step], self.lengths[first::step])


def answers_of(logprobs: Tensor, tokens: Tokens, *, compared: bool) -> Answers:
    """Sum up the sequences of a micro-batch.

    Args:
        logprobs: [N], of the policy.
        tokens: Their surroundings; with `compared`, they carry `reference_logprobs`.
        compared: Whether there is a reference.

    Raises:
        ValueError: There are tokens without `reference_logprobs`.
    """
    wide = logprobs.to(torch.float64)
    total = torch.zeros(tokens.sequences, dtype=torch.float64, device=logprobs.device)
    logps = total.index_add(0, tokens.sequence, wide)
    lengths = total.index_add(0, tokens.sequence, torch.ones_like(wide))
    if not compared:
        return Answers(logps, logps, lengths)
    if "reference_logprobs" not in tokens.per_token and wide.numel():
        raise ValueError("the objective compares with a reference; this batch carries no reference_logprobs")
    reference = tokens.per_token.get("reference_logprobs", wide.detach()).to(torch.float64)
    return Answers(logps, total.index_add(0, tokens.sequence, wide - reference), lengths)


def first_tokens(tokens: Tokens) -> Tensor:
    """Return [S]: which scored token is the first of each sequence.

    Sequences follow each other in the order of their indices, as packing lays them, and each has a scored token.
    """
    return torch.searchsorted(tokens.sequence, torch.arange(tokens.sequences, device=tokens.sequence.device))


def of_sequences(name: str, tokens: Tokens) -> Tensor:
    """Return [S]: what every token of a sequence carries alike; nothing where nobody carries anything."""
    values = tokens.per_token.get(name)
    return tokens.weights.new_zeros(0) if values is None else values[first_tokens(tokens)]


def at_first_tokens(values: Tensor, tokens: Tokens, step: int = 1) -> Tensor:
    """Return [N] terms that are 0 but for the first token of every step-th sequence, which has its value."""
    positions = first_tokens(tokens)[::step]
    return values.new_zeros(tokens.weights.numel()).index_add(0, positions, values)


ODDS_MARGIN = 1e-12
"""An answer's probability is held below 1 by this much where odds are taken: at 1 they are infinite."""


class Pairs(NamedTuple):
    """The two sides of P pairs, [P] each."""

    chosen: Answers
    """Answers that should win."""
    rejected: Answers
    """Answers to the same prompts that should lose."""


class PairLoss(Protocol):
    """The protocol of a loss over pairs."""

    def losses(self, pairs: Pairs) -> Tensor:
        """Return the loss of each pair.

        Args:
            pairs: The P pairs of a micro-batch.

        Returns:
            [P] losses, differentiable in the answers' log-probabilities.
        """

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward that the loss implies for each answer, for metrics.

        Args:
            answers: One side of the pairs.

        Returns:
            [P] rewards, as beta times the log ratio in DPO.
        """


def _log_ratios(answers: Answers, lengths: Lengths) -> Tensor:
    return answers.log_ratios if lengths == "sum" else answers.log_ratios / answers.lengths


@dataclass(frozen=True)
class _ReferenceLoss:
    """Base class of losses with a reference policy."""

    beta: float
    lengths: Lengths = "sum"

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta r (DPO, arXiv:2305.18290, eq. 5, up to a constant of the prompt)."""
        return self.beta * _log_ratios(answers, self.lengths)

    def margins(self, pairs: Pairs) -> Tensor:
        """Return beta (r_chosen - r_rejected)."""
        return self.rewards(pairs.chosen) - self.rewards(pairs.rejected)


@dataclass(frozen=True)
class DPO(_ReferenceLoss):
    """Likelihood that the chosen answer wins, under the Bradley-Terry model of beta r.

    Rafailov et al. (arXiv:2305.18290), eq. 7. With smoothing e, cDPO: the expectation over labels of which a share e is
    swapped (Mitchell, 2023, "A note on DPO with noisy preferences"). With mean lengths, length-normalised DPO
    (Tulu 3, arXiv:2411.15124).
    """

    label_smoothing: float = 0.0

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)."""
        margins, swapped = self.margins(pairs), self.label_smoothing
        return -(1 - swapped) * logsigmoid(margins) - swapped * logsigmoid(-margins)


@dataclass(frozen=True)
class Robust(_ReferenceLoss):
    """DPO's loss without the bias that a share e of swapped pairs gives it (Chowdhury et al., arXiv:2403.00409).

    It has no lower bound: a pair that is ordered very wrongly may have a negative loss.
    """

    label_smoothing: float = 0.1

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: (-(1 - e) log sigmoid(margin) + e log sigmoid(-margin)) / (1 - 2 e)."""
        margins, swapped = self.margins(pairs), self.label_smoothing
        return (-(1 - swapped) * logsigmoid(margins) + swapped * logsigmoid(-margins)) / (1 - 2 * swapped)


@dataclass(frozen=True)
class IPO(_ReferenceLoss):
    """Regression of the margin on 1 / (2 beta) (Azar et al., arXiv:2310.12036, eq. 17, whose tau is beta)."""

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: (r_chosen - r_rejected - 1 / (2 beta))^2."""
        difference = _log_ratios(pairs.chosen, self.lengths) - _log_ratios(pairs.rejected, self.lengths)
        return (difference - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class Hinge(_ReferenceLoss):
    """DPO's margin, raised to 1 and no further: the hinge of SLiC-HF (Zhao et al., arXiv:2305.10425).

    They compare log-probabilities; less the reference's it is the hinge-norm loss of Liu et al. (arXiv:2309.06657),
    with their gamma for beta, and TRL's hinge.
    """

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: max(0, 1 - margin)."""
        return torch.relu(1 - self.margins(pairs))


@dataclass(frozen=True)
class APOZero(_ReferenceLoss):
    """Raise what was chosen and lower what was rejected, each on its own (APO-zero, arXiv:2408.06266, eq. 7)."""

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: 1 - sigmoid(beta r_chosen) + sigmoid(beta r_rejected)."""
        return torch.sigmoid(-self.rewards(pairs.chosen)) + torch.sigmoid(self.rewards(pairs.rejected))


@dataclass(frozen=True)
class APODown(_ReferenceLoss):
    """Lower both, the rejected more, where both are worse than the policy's own (APO-down, arXiv:2408.06266, eq. 8)."""

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: sigmoid(beta r_chosen) + 1 - sigmoid(beta (r_chosen - r_rejected))."""
        return torch.sigmoid(self.rewards(pairs.chosen)) + torch.sigmoid(-self.margins(pairs))


@dataclass(frozen=True)
class _ReferenceFreeLoss:
    """Base class of losses without a reference policy."""

    beta: float

    def rewards(self, answers: Answers) -> Tensor:
        """Return beta m."""
        return self.beta * answers.mean_logps


@dataclass(frozen=True)
class SimPO(_ReferenceFreeLoss):
    """Likelihood that the chosen answer wins by a margin, by log-probability per token (arXiv:2405.14734, eq. 6)."""

    gamma: float

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: -log sigmoid(beta (m_chosen - m_rejected) - gamma)."""
        return -logsigmoid(self.rewards(pairs.chosen) - self.rewards(pairs.rejected) - self.gamma)


@dataclass(frozen=True)
class ORPO(_ReferenceFreeLoss):
    """Likelihood of the chosen answer, and the odds by which it wins (Hong et al., arXiv:2403.07691, eqs. 4 to 7).

    Both parts are per pair: the likelihood is the mean over the chosen answer's tokens, and not over a batch's.
    """

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: -m_chosen - beta log sigmoid(log odds_chosen - log odds_rejected)."""
        difference = _log_odds(pairs.chosen.mean_logps) - _log_odds(pairs.rejected.mean_logps)
        return -pairs.chosen.mean_logps - self.beta * logsigmoid(difference)


@dataclass(frozen=True)
class BradleyTerry:
    """Likelihood that the chosen answer wins, by the scores of a reward model (arXiv:2203.02155, eq. 1).

    `center` weighs the square of a pair's summed scores (Eisenstein et al., arXiv:2312.09244, appendix A).
    """

    center: float = 0.0

    def losses(self, pairs: Pairs) -> Tensor:
        """Return [P]: -log sigmoid(s_chosen - s_rejected) + center (s_chosen + s_rejected)^2."""
        chosen, rejected = (self.rewards(side) for side in pairs)
        return -logsigmoid(chosen - rejected) + self.center * (chosen + rejected).square()

    def rewards(self, answers: Answers) -> Tensor:
        """Return the scores."""
        return answers.scores


def _log_odds(mean_logps: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(mean log-probability)."""
    bounded = mean_logps.clamp(max=-ODDS_MARGIN)
    return bounded - (-torch.expm1(bounded)).log()


_BY_KIND: Mapping[str, Callable[..., PairLoss]] = {
    "dpo": DPO,
    "robust": Robust,
    "ipo": IPO,
    "hinge": Hinge,
    "apo_zero": APOZero,
    "apo_down": APODown,
    "simpo": SimPO,
    "orpo": ORPO,
}
"""What each takes is called as in its section."""


def pair_loss_of(config: BuiltInPairLoss) -> PairLoss:
    """Return the loss that a section names."""
    return _BY_KIND[config.kind](**config.model_dump(exclude={"kind", "weight"}))
