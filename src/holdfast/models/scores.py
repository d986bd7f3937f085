"""Log-probabilities and entropy of chosen tokens, without the logits of a sequence.

Tokens are scored in chunks. A form of the arithmetic (`models/chunks/`) multiplies a chunk's hidden states with the
head, sweeps the logits for their statistics, and turns them into the slopes of a loss; torch's operations do so
anywhere, Triton kernels on a GPU.

Two kinds of losses share it. A separable loss knows its gradient as soon as a chunk's log-probabilities are known, so
the gradients of hidden states and head are formed in the forward pass: three matrix products in all. Any other loss
keeps only log-probabilities and computes each chunk again in the backward pass: four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.models.chunks.form import Form, ScoreOptions, Statistics
from holdfast.models.chunks.kernel_form import KernelForm, kernels_take
from holdfast.models.chunks.logits import HeadWeights, factors_of, product_dtype
from holdfast.models.chunks.torch_form import TorchForm
from holdfast.models.layers.family import HeadSpec
from holdfast.types import Scores

TokenTerms = Callable[[Tensor, Tensor | None, int, int], Tensor]
"""(log-probabilities [n], entropy [n] or None, start, end) -> weighted loss terms [n] of tokens start..end-1"""

_WEIGHT = 1
"""Index of the weight's gradient among those of hidden states, weight and bias."""
_TAKER = "_holdfast_takes_wide_gradients"


def take_wide_gradients(weight: Tensor, take: Callable[[Tensor], None]) -> None:
    """Let a head's matrix give away its gradient in float32, where a form sums it so, in place of a narrowed one.

    Args:
        weight: In a narrower dtype.
        take: Called in each backward pass, with a gradient that nobody else has.
    """
    setattr(weight, _TAKER, take)


def keep_gradients(weight: Tensor) -> None:
    """Let a head's matrix give away no gradient any more."""
    if hasattr(weight, _TAKER):
        delattr(weight, _TAKER)


def taker_of(weight: Tensor) -> Callable[[Tensor], None] | None:
    """Return what takes a matrix's gradient in float32; None where it wants one in its own dtype."""
    taker: Callable[[Tensor], None] | None = getattr(weight, _TAKER, None)
    return taker


def score(
    hidden: Tensor,
    head: HeadWeights,
    targets: Tensor,
    spec: HeadSpec,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Scores:
    """Score tokens, differentiably; the backward pass computes each chunk again.

    Args:
        hidden: [N, H], the hidden state that predicts each token.
        head: The output layer.
        targets: [N] int64.
        spec: How logits follow from hidden states.
        temperature: Divides the logits.
        entropy: Also return the entropy (one more sweep over each chunk).
    """
    options = ScoreOptions(spec, temperature, entropy, torch.is_grad_enabled())
    logprobs, entropies, accuracy = _Recompute.apply(hidden, head.weight, head.bias, targets, options)  # type: ignore[no-untyped-call]
    return Scores(logprobs, accuracy, entropies if entropy else None)


def separable_loss(  # noqa: PLR0913 - the operands of a formula
    hidden: Tensor,
    head: HeadWeights,
    targets: Tensor,
    terms: TokenTerms,
    spec: HeadSpec,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Scores]:
    """Sum a loss over tokens and form its gradients in the same pass.

    Args:
        terms: The weighted loss of each token of a chunk.
        label_smoothing: Share of the label spread over all tokens alike, in the log-probabilities that `terms` sees.
        hidden, head, targets, spec, temperature, entropy: As in `score`.

    Returns:
        The differentiable sum [] and the detached scores.
    """
    options = ScoreOptions(spec, temperature, entropy, torch.is_grad_enabled(), label_smoothing)
    states, product_head, form = _prepared(hidden, head, options)
    gradients, outputs = _HeadGradients(states, product_head, spec), _Outputs(states)
    loss = torch.zeros((), dtype=outputs.dtype, device=hidden.device)
    with torch.no_grad():
        for rows in _chunks(states, form):
            statistics = form.statistics(states[rows], targets[rows])
            value, by_logprob, by_entropy = _differentiate(terms, statistics, rows)
            loss += value
            outputs.keep(rows, statistics)
            if gradients.wanted:
                gradients.add(form, statistics, targets, rows, by_logprob, by_entropy)
    taker = taker_of(head.weight) if form.sums_wide else None
    total: Tensor = WithGradients.apply(hidden, *head, loss, gradients.sums(), taker)  # type: ignore[no-untyped-call]
    return total, Scores(outputs.logprobs, outputs.accuracy, outputs.entropy if entropy else None)


class _HeadGradients:
    """Gradients of one call: rows of hidden states as they come, head gradients summed in float32 or better.

    Args:
        states: As they are multiplied; like the head, they say by `requires_grad` what is wanted.
        head: The same.
        spec: Says in which dtype products are.
    """

    def __init__(self, states: Tensor, head: HeadWeights, spec: HeadSpec) -> None:
        self._wide = torch.float64 if states.dtype == torch.float64 else torch.float32
        self._states, self._head, self._dtype = states, head, product_dtype(spec, states.dtype)
        self._by_hidden = torch.empty_like(states, dtype=self._dtype) if states.requires_grad else None
        self._by_weight: Tensor | None = None
        self._by_bias = self._zeros(head.bias)

    @property
    def wanted(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in (self._states, *self._head))

    def add(  # noqa: PLR0913, PLR0917 - the operands of a formula
        self,
        form: Form,
        statistics: Statistics,
        targets: Tensor,
        rows: slice,
        by_logprob: Tensor,
        by_entropy: Tensor | None,
    ) -> None:
        """Add a chunk's part, given the loss's derivatives by its log-probabilities and entropies."""
        slopes, factor = form.slopes(statistics, targets[rows], by_logprob, by_entropy)
        states = self._states[rows].to(self._dtype)
        narrow = slopes.to(states.dtype)
        narrow_factor = None if factor is None else factor[:, None].to(states.dtype)
        if self._by_hidden is not None:
            product = narrow @ self._weight
            self._by_hidden[rows] = product if narrow_factor is None else product.mul_(narrow_factor)
        if self._head.weight.requires_grad:
            rows_of_product = states if narrow_factor is None else states * narrow_factor
            self._by_weight = form.add_product(self._by_weight, narrow, rows_of_product)
        if self._by_bias is not None:
            self._by_bias += slopes.sum(0, dtype=self._by_bias.dtype) if factor is None else factor @ slopes

    @cached_property
    def _weight(self) -> Tensor:
        """The head's matrix in the dtype of the slopes."""
        return self._head.weight.detach().to(self._dtype)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, the sums as wide as they were added up."""
        by_weight = self._zeros(self._head.weight) if self._by_weight is None else self._by_weight  # of no token
        return self._by_hidden, by_weight, self._by_bias

    def _zeros(self, tensor: Tensor | None) -> Tensor | None:
        return torch.zeros_like(tensor, dtype=self._wide) if tensor is not None and tensor.requires_grad else None


def _prepared(hidden: Tensor, head: HeadWeights, options: ScoreOptions) -> tuple[Tensor, HeadWeights, Form]:
    """Cast hidden states and head to the dtype in which they are multiplied, and choose the form.

    Of what is returned, requires_grad says which gradients are wanted.
    """
    states, product_head = factors_of(hidden, head, options.spec)
    for cast, tensor in zip((states, *product_head), (hidden, *head), strict=True):
        if cast is not None and tensor is not None:
            cast.requires_grad_(tensor.requires_grad and options.want_gradients)
    takes = kernels_take(options, product_dtype(options.spec, hidden.dtype))
    form: Form = (KernelForm if takes else TorchForm)(product_head, options)
    return states, product_head, form


def _chunks(states: Tensor, form: Form) -> Iterator[slice]:
    for start in range(0, states.shape[0], form.tokens):
        yield slice(start, min(start + form.tokens, states.shape[0]))


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd's form
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ScoreOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, _, form = _prepared(hidden, HeadWeights(weight, bias), options)
        outputs = _Outputs(states)
        with torch.no_grad():
            for rows in _chunks(states, form):
                outputs.keep(rows, form.statistics(states[rows], targets[rows]))
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options, ctx.take = options, taker_of(weight) if form.sums_wide else None
        ctx.mark_non_differentiable(outputs.accuracy)
        return outputs.logprobs, outputs.entropy, outputs.accuracy

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor, by_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        assert weight.untyped_storage().size(), "FSDP2 freed the head, and its loss computes from it again"
        options: ScoreOptions = ctx.options
        states, head, form = _prepared(hidden, HeadWeights(weight, bias), options)
        gradients = _HeadGradients(states, head, options.spec)
        with torch.no_grad():
            for rows in _chunks(states, form):
                statistics = form.statistics(states[rows], targets[rows])
                by_chunk_entropy = by_entropy[rows] if options.want_entropy else None
                gradients.add(form, statistics, targets, rows, by_logprobs[rows], by_chunk_entropy)
        dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        return (*narrowed(list(gradients.sums()), dtypes, take=ctx.take), None, None)


class _Outputs:
    """The [N] results of all chunks."""

    def __init__(self, states: Tensor) -> None:
        self.dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
        tokens, device = states.shape[0], states.device
        self.logprobs = torch.empty(tokens, dtype=self.dtype, device=device)
        self.entropy = torch.zeros(tokens, dtype=self.dtype, device=device)
        self.accuracy = torch.empty(tokens, dtype=torch.float32, device=device)

    def keep(self, rows: slice, statistics: Statistics) -> None:
        self.logprobs[rows] = statistics.logprobs
        self.accuracy[rows] = statistics.accuracy
        if statistics.entropy is not None:
            self.entropy[rows] = statistics.entropy


def _differentiate(terms: TokenTerms, statistics: Statistics, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's loss and its derivatives by log-probability and entropy."""
    with torch.enable_grad():
        logprobs = statistics.label_logprobs.detach().requires_grad_()
        entropy = None if statistics.entropy is None else statistics.entropy.detach().requires_grad_()
        value = terms(logprobs, entropy, rows.start, rows.stop).sum()
        inputs = [logprobs] if entropy is None else [logprobs, entropy]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(value, inputs, allow_unused=True)
    by_logprob = torch.zeros_like(statistics.logprobs) if gradients[0] is None else gradients[0]
    return value.detach(), by_logprob, gradients[1] if len(gradients) > 1 else None


class WithGradients(torch.autograd.Function):
    """A loss whose gradients by hidden states, weight and bias are known already, maybe in a wider dtype than theirs.

    They are narrowed in the backward pass: until then a head that is split over ranks is gathered. The weight's is not
    where it is taken (`take_wide_gradients`).
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd's form
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: Sequence[Tensor | None],
        take: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Return the loss, and note its gradients."""
        ctx.parts, ctx.take = list(gradients), take
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Any, ...]:
        """Return the gradients that were noted, times the loss's own."""
        return (*narrowed(ctx.parts, ctx.dtypes, by_loss, ctx.take), None, None, None)


def narrowed(
    parts: list[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
    factor: Tensor | None = None,
    take: Callable[[Tensor], None] | None = None,
) -> list[Tensor | None]:
    """Return gradients in the dtypes of what they belong to, maybe times a factor; `parts` is emptied as they are.

    Where there is a `take`, it gets the weight's, which is then not returned.
    """
    results: list[Tensor | None] = []
    for index, dtype in enumerate(dtypes):
        part = parts.pop(0)
        if part is not None and take is not None and index == _WEIGHT:
            take(part if factor is None else part.mul_(factor.to(part.dtype)))
            part = None
        elif part is not None:
            part = part.to(dtype)  # the wide one is freed before the next is narrowed
            part = part if factor is None else part.mul_(factor.to(part.dtype))
        results.append(part)
    return results
