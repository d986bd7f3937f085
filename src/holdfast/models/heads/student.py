"""A student and its teachers over the whole vocabulary, without the logits of a sequence of any.

Within the student's forward pass each teacher in turn makes its own, up to hidden states. While the parameters of both
heads are gathered, the logits of one chunk of tokens at a time are formed of both, compared, and turned into the
gradients of the student's hidden states and head: four matrix products for each teacher, two of them for the gradients.
Alive at once are a chunk's logits of both and a copy in the product's dtype, 3 [n, V], and up to eight temporaries over
a block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from holdfast.models.chunks.logits import (
    CACHE_ELEMENTS,
    HeadWeights,
    accuracy_of,
    add_product,
    chunk_tokens,
    count_largest,
    factors_of,
    logits_of,
    product_dtype,
)
from holdfast.models.heads import spans
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import HeadSpec
from holdfast.models.scores import WithGradients
from holdfast.objectives.base import Objective, Tokens, ratio, scored_tokens
from holdfast.objectives.supervised import Distillation, generalised_jsd, supervised_sums
from holdfast.types import Batch, LossSum, Scores

_BUFFERS = 3
"""Chunks of logits alive at once."""
_BLOCK_ELEMENTS_ON_DEVICE = 2**24
"""Logits compared at once on a device."""


HeadObserver = Callable[..., None]
"""(head specification, hidden states that predict the tokens, [N, H'], head, weight=...): takes how a teacher's logits
follow from its hidden states, and its factor in the loss."""


@dataclass(frozen=True)
class WeightedTeacher:
    """A teacher, with the student's tokens and in evaluation mode, and its part in a comparison."""

    model: PolicyModel
    weight: float = 1.0
    """Factor of the divergence from it."""


class TeacherComparison:
    """A comparison with teachers: an objective of a `StudentModel`, which alone sees whole distributions.

    The divergence of a token is the sum over teachers of weight times the divergence from that teacher; weights are
    taken as they are, and need not sum to 1.

    Args:
        loss: What is compared.
        teachers: At least one; batches go to each as they go to the student.
    """

    separable = True
    needs_entropy = False
    needs_teacher_logprobs = False

    def __init__(self, loss: Distillation, teachers: Sequence[WeightedTeacher]) -> None:
        self.loss = loss
        self.teachers = tuple(teachers)

    def show(self, batch: Batch, look: HeadObserver) -> None:
        """Let a function look at the predictions of each teacher in turn."""
        for teacher in self.teachers:
            model = teacher.model
            model.show_predictors(batch, partial(look, model.head_spec, weight=teacher.weight))

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Belongs to losses of single log-probabilities."""
        raise AssertionError("a divergence takes whole distributions: the model is no StudentModel")

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return what supervised losses tell; the model adds what the comparison tells."""
        return supervised_sums(scores, tokens)


class StudentModel(PolicyModel):
    """As `PolicyModel`, for an objective that compares with a teacher."""

    def _scored(
        self, hidden: Tensor, batch: Batch, objective: Objective | None, temperature: float, entropy: bool
    ) -> LossSum | Scores:
        if not isinstance(objective, TeacherComparison):
            return super()._scored(hidden, batch, objective, temperature, entropy)
        predicted = hidden.flatten(0, 1).index_select(0, spans.predictors(batch))
        targets, tokens = batch.tokens.flatten()[spans.scored_here(batch)], scored_tokens(batch)
        compared = partial(
            distilled,
            targets=targets,
            weights=spans.tokens_here(tokens, batch).weights,
            loss=objective.loss,
            spec=self.head_spec,
            ask=partial(objective.show, batch),
            entropy=entropy,
        )
        loss, scores, sums = self._with_head(predicted, compared, again=False)
        scores = spans.scores_of_all(scores, batch, self.context)
        return LossSum(loss, scores, spans.counted_once(objective.sums(scores, tokens), batch) | sums)


def distilled(  # noqa: PLR0913 - both sides of a comparison
    hidden: Tensor,
    head: HeadWeights,
    targets: Tensor,
    weights: Tensor,
    loss: Distillation,
    spec: HeadSpec,
    ask: Callable[[HeadObserver], None],
    *,
    entropy: bool = False,
) -> tuple[Tensor, Scores, dict[str, Tensor]]:
    """Sum a comparison with a teacher over tokens and form its gradients in the same pass.

    Args:
        hidden: [N, H], the student's hidden state that predicts each token.
        head: The student's output layer. Columns that only one of both heads has are compared by nobody.
        targets: [N] int64, the tokens.
        weights: [N], of their terms.
        loss: What is compared.
        spec: How the student's logits follow from hidden states.
        ask: Lets a function look at the predictions of each teacher, once.
        entropy: Also return the student's entropy.

    Returns:
        The differentiable sum [], the student's detached scores at temperature 1, and metrics as totals and counts.
    """
    comparison = _Comparison(hidden, head, spec, targets, weights, loss, entropy=entropy)
    with torch.no_grad():
        ask(comparison.look)
    total: Tensor = WithGradients.apply(hidden, *head, comparison.total(), comparison.gradients())  # type: ignore[no-untyped-call]
    return total, Scores(comparison.logprobs, comparison.accuracy, comparison.entropy), comparison.sums()


class _Comparison:
    """What comes of N tokens, filled chunk by chunk."""

    def __init__(  # noqa: PLR0913 - as `distilled`
        self,
        hidden: Tensor,
        head: HeadWeights,
        spec: HeadSpec,
        targets: Tensor,
        weights: Tensor,
        loss: Distillation,
        *,
        entropy: bool,
    ) -> None:
        grad_enabled = torch.is_grad_enabled()
        self._states, self._head = factors_of(hidden, head, spec)
        self._dtype = product_dtype(spec, hidden.dtype)
        exact = torch.promote_types(self._dtype, torch.float32)
        self._spec, self._targets, self._weights, self._loss = spec, targets, weights.to(exact), loss
        self._by_hidden, self._by_weight, self._by_bias = (
            torch.zeros_like(tensor, dtype=dtype)
            if tensor is not None and tensor.requires_grad and grad_enabled
            else None
            for tensor, dtype in zip((hidden, *head), (self._dtype, exact, exact), strict=True)
        )
        self._wants_gradients = any(tensor is not None for tensor in (self._by_hidden, self._by_weight, self._by_bias))
        empty = partial(torch.zeros, targets.shape[0], device=hidden.device)
        self.logprobs, self.divergences, self.teacher_logprobs = (empty(dtype=exact) for _ in range(3))
        self.accuracy, self.agreement = empty(), empty(dtype=exact)
        self.entropy = empty(dtype=exact) if entropy else None
        self._teacher_weights, self._sft_weight = 0.0, loss.sft_weight

    def look(self, spec: HeadSpec, hidden: Tensor, head: HeadWeights, weight: float = 1.0) -> None:
        """Compare with a teacher's predictions, and add to the gradients; the student's logits are made once more."""
        self._sft_weight = 0.0 if self._teacher_weights else self._loss.sft_weight
        self._teacher_weights += weight
        states, head = factors_of(hidden, head, spec)
        vocabulary = self._head.weight.shape[0]
        size = chunk_tokens(self._spec, _BUFFERS * vocabulary, hidden.device)
        on_cpu = hidden.device.type == "cpu"
        block = max(1, (CACHE_ELEMENTS if on_cpu else _BLOCK_ELEMENTS_ON_DEVICE) // vocabulary)
        for start in range(0, states.shape[0], size):
            stop = min(start + size, states.shape[0])
            logits, slope = logits_of(self._states[start:stop], self._head, self._spec)
            taught = logits_of(states[start:stop], head, spec)[0].to(logits.dtype)
            for first in range(start, stop, block):
                rows = slice(first, min(first + block, stop))
                here = slice(rows.start - start, rows.stop - start)
                self._compare(logits[here], taught[here], rows, weight)
            del taught
            if self._wants_gradients:
                self._add(logits if slope is None else logits.mul_(slope), slice(start, stop))
            del logits, slope  # or two chunks of logits would be alive at once

    def _compare(self, logits: Tensor, taught: Tensor, rows: slice, weight: float) -> None:
        """Compare rows of a chunk, [r, V] logits each; the student's become the loss's derivative."""
        loss, targets = self._loss, self._targets[rows, None]
        shared = min(logits.shape[1], taught.shape[1])
        taught = taught[:, :shared]
        logprobs = logits.log_softmax(-1)
        self.logprobs[rows] = logprobs.gather(1, targets).squeeze(1)
        best = logits.argmax(-1)
        maximum, largest = count_largest(logits)
        self.accuracy[rows] = accuracy_of(logits.gather(1, targets).squeeze(1), maximum, largest)
        self.agreement[rows] += (best == taught.argmax(-1)) * weight
        self.teacher_logprobs[rows] += (taught.gather(1, targets).squeeze(1) - taught.logsumexp(-1)) * weight
        if self.entropy is not None:
            self.entropy[rows] = -(logprobs.exp() * logprobs).sum(-1)
        same = loss.temperature == 1.0 and shared == logits.shape[1]
        student = logprobs if same else (logits[:, :shared] / loss.temperature).log_softmax(-1)
        divergence = generalised_jsd(student, (taught / loss.temperature).log_softmax(-1), loss.beta)
        self.divergences[rows] += divergence.values * weight
        if not self._wants_gradients:
            return
        logits.zero_()
        if self._sft_weight:
            torch.exp(logprobs, out=logits).mul_(self._sft_weight)
            logits.scatter_add_(1, targets, torch.full_like(targets, -self._sft_weight, dtype=logits.dtype))
        logits[:, :shared].add_(divergence.by_logits, alpha=weight / loss.temperature)
        logits.mul_(self._weights[rows, None])

    def _add(self, by_logits: Tensor, rows: slice) -> None:
        """Add a chunk's part of the gradients, given the loss's derivative by its logits, which is consumed."""
        states = self._states[rows].to(self._dtype)
        by_logits.mul_(self._spec.scale)
        narrow = by_logits.to(states.dtype)
        if self._by_hidden is not None:
            self._by_hidden[rows] += narrow @ self._weight
        if self._by_weight is not None:
            add_product(self._by_weight, narrow, states)
        if self._by_bias is not None:
            self._by_bias += by_logits.sum(0)

    @cached_property
    def _weight(self) -> Tensor:
        """The head's matrix in the dtype of the slopes."""
        return self._head.weight.to(self._dtype)

    def total(self) -> Tensor:
        """Return the weighted sum []."""
        terms = self.divergences - self._loss.sft_weight * self.logprobs
        return (terms * self._weights).sum()

    def gradients(self) -> list[Tensor | None]:
        """Return those of hidden states, weight and bias, as they were added up."""
        return [self._by_hidden, self._by_weight, self._by_bias]

    def sums(self) -> dict[str, Tensor]:
        """Return the mean divergence, the teacher's own loss on the tokens, and how often both have one favourite.

        The last two are means over teachers by their weights.
        """
        count = float(self.logprobs.numel())
        of_teachers = count * self._teacher_weights
        return {
            "divergence": ratio(self.divergences.sum(dtype=torch.float64), count),
            "teacher/nll": ratio(-self.teacher_logprobs.sum(dtype=torch.float64), of_teachers),
            "teacher/agreement": ratio(self.agreement.sum(dtype=torch.float64), of_teachers),
        }
