"""Losses with given targets: tokens, a teacher's distribution, or the returns of a critic.

In distillation, the student's distribution q is compared with the teacher's p over the whole vocabulary. With the
mixture m = beta p + (1 - beta) q, the generalised Jensen-Shannon divergence of GKD (Agarwal et al., arXiv:2306.13649,
section 2) and its derivative by the student's logits z, q = softmax(z), are

    D          = beta KL(p, m) + (1 - beta) KL(q, m)
    dD / dz_j  = (1 - beta) q_j (log q_j - log m_j - KL(q, m))

D is 0 at beta 0 and 1. D / beta tends to KL(p, q) and D / (1 - beta) to KL(q, p); those limits are what beta 0 and 1
are defined to mean here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.objectives.base import Objective, Tokens, carried, ratio
from holdfast.types import Scores


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-log p(token); its token_mean is the loss transformers computes.

    With labels smoothed by e, -(1 - e) log p(token) - e mean over the vocabulary of log p (Szegedy et al.,
    arXiv:1512.00567, section 7, with the uniform distribution): the head makes these log-probabilities, in its one
    pass, and `token_terms` sees them in the place of log p(token).
    """

    separable: bool = True
    needs_entropy: bool = False
    label_smoothing: float = 0.0

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
    """Return the metrics nll, mean_token_accuracy and, where it was computed, entropy.

    Args:
        scores: [N] scores of the trained tokens.
        tokens: The same tokens.
    """
    count = float(tokens.weights.numel())
    sums = {
        "nll": ratio(-scores.logprobs.sum(dtype=torch.float64), count),
        "mean_token_accuracy": ratio(scores.accuracy.sum(dtype=torch.float64), count),
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

    def token_terms(self, values: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] terms of the critic's values."""
        plain, bounded = self._errors(values, tokens)
        return torch.maximum(plain, bounded) / 2

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the share of values that the bound holds, where there is one."""
        if self.clip is None:
            return {}
        plain, bounded = self._errors(scores.values, tokens)
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


class Comparison(Objective, Protocol):
    """A loss that compares a student with its teacher."""

    @property
    def needs_teacher_logprobs(self) -> bool:
        """Whether it reads the column `teacher_logprobs`; else it asks the teacher itself."""


class Divergence(NamedTuple):
    """Divergence of n tokens, and its derivative."""

    values: Tensor
    """[n], in nats"""
    by_logits: Tensor
    """[n, V] derivative by the student's logits, after the temperature"""


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Divergence:
    """Compare log-probabilities [n, V] of both; `teacher` is consumed.

    Args:
        student: Finite.
        teacher: Finite.
        beta: In [0, 1]; 0 is KL(teacher, student), 1 is KL(student, teacher).
    """
    if beta == 0.0:
        p = teacher.exp()
        values = (p * teacher.sub_(student)).sum(-1)
        return Divergence(values, student.exp().sub_(p))
    q = student.exp()
    if beta == 1.0:
        log_ratios = teacher.neg_().add_(student)
        values = (q * log_ratios).sum(-1)
        return Divergence(values, q.mul_(log_ratios.sub_(values[:, None])))
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    of_teacher = (teacher.exp() * teacher.sub_(mixture)).sum(-1)
    log_ratios = mixture.neg_().add_(student)
    of_student = (q * log_ratios).sum(-1)
    by_logits = q.mul_(log_ratios.sub_(of_student[:, None])).mul_(1.0 - beta)
    return Divergence(beta * of_teacher + (1.0 - beta) * of_student, by_logits)


@dataclass(frozen=True)
class Distillation:
    """Divergence from a teacher, and perhaps the likelihood of the token, per token."""

    beta: float
    """Argument `beta` of `generalised_jsd`."""
    temperature: float = 1.0
    """Divides the logits of both."""
    sft_weight: float = 0.0
    """Factor of -log p(token), at temperature 1."""


@dataclass(frozen=True)
class SampledReverseKL:
    """KL(student, teacher) at tokens that the student sampled: a policy gradient with that cost per token.

    c = log student - log teacher, without its gradient; the term has the value c and the gradient c grad log student,
    whose expectation over the student's tokens is the gradient of the KL divergence at each of them. What a token does
    to later ones is left out, as in the divergence of whole distributions.
    """

    separable: bool = True
    needs_entropy: bool = False
    needs_teacher_logprobs: bool = True

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] estimates of the divergence, in nats; a single one may be negative."""
        before = logprobs.detach()
        cost = before - tokens.per_token["teacher_logprobs"].to(logprobs.dtype)
        return cost + cost * (logprobs - before)

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the mean estimate, and what supervised losses tell."""
        teacher = _teacher_logprobs(scores, tokens)
        estimate = ratio((scores.logprobs - teacher).sum(dtype=torch.float64), float(teacher.numel()))
        return supervised_sums(scores, tokens) | {"divergence": estimate, "teacher/nll": _teacher_nll(scores, tokens)}


@dataclass(frozen=True)
class BothLikelihoods(NegativeLogLikelihood):
    """-log student at given tokens, beside -log teacher.

    On tokens that the student did not sample, the difference of the two is not an estimate of a divergence.
    """

    needs_teacher_logprobs: bool = True

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the teacher's mean, and what supervised losses tell."""
        return supervised_sums(scores, tokens) | {"teacher/nll": _teacher_nll(scores, tokens)}


def _teacher_logprobs(scores: Scores, tokens: Tokens) -> Tensor:
    return tokens.per_token["teacher_logprobs"].to(scores.logprobs.dtype)


def _teacher_nll(scores: Scores, tokens: Tokens) -> Tensor:
    teacher = _teacher_logprobs(scores, tokens)
    return ratio(-teacher.sum(dtype=torch.float64), float(teacher.numel()))
