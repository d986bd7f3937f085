"""Log-probabilities and entropy of chosen tokens, without the logits of a sequence.

Tokens are scored in chunks; a chunk's logits live in one buffer that is turned in place into exp(logit - max). From
that buffer, its row sums and its row maxima follow the log-probability, the entropy and every gradient:

    log p_t   = l_t - m - log z            z = sum_j e_j,  e_j = exp(l_j - m)
    H         = log z - (1/z) sum_j e_j log e_j
    dlog p_t / dl_j = [j = t] - e_j / z
    dH / dl_j       = -(e_j / z) (log e_j - log z + H)

Labels smoothed by e stand for the log-probability s = (1 - e) log p_t + e mean_j log p_j over V tokens, with
ds / dl_j = (1 - e) [j = t] + e / V - e_j / z.

Two forms share this arithmetic. A separable loss knows its gradient as soon as a chunk's log-probabilities are known,
so the gradients of hidden states and head are formed in the forward pass: three matrix products in all. Any other loss
keeps only log-probabilities and computes each chunk again in the backward pass: four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.models.accuracy import accuracy_of, count_largest
from holdfast.models.layers.family import HeadSpec
from holdfast.types import Scores

TokenTerms = Callable[[Tensor, Tensor | None, int, int], Tensor]
"""(log-probabilities [n], entropy [n] or None, start, end) -> weighted loss terms [n] of tokens start..end-1"""

CACHE_ELEMENTS = 65_536
"""Logits swept at once on the CPU: a block that stays in the second-level cache between two passes over it."""

_PRODUCT_BYTES = 2**25
"""Of a product that is to be added to a wider sum: as much of the vocabulary at once as makes so many."""


class HeadWeights(NamedTuple):
    """The head's parameters, as they are inside the sharded root's forward."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""


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
    how = _How(spec, temperature, entropy, torch.is_grad_enabled())
    logprobs, entropies, accuracy = _Recompute.apply(hidden, head.weight, head.bias, targets, how)  # type: ignore[no-untyped-call]
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
    how = _How(spec, temperature, entropy, torch.is_grad_enabled(), label_smoothing)
    states, product_head = _prepared(hidden, head, how)
    gradients, outputs = _HeadGradients(states, product_head, how), _Outputs(states)
    loss = torch.zeros((), dtype=outputs.dtype, device=hidden.device)
    with torch.no_grad():
        for rows in _chunks(states, product_head, how):
            chunk = _forward_chunk(states[rows], product_head, targets[rows], how)
            value, by_logprob, by_entropy = _differentiate(terms, chunk, rows)
            loss += value
            outputs.keep(rows, chunk)
            if gradients.wanted:
                gradients.add(chunk, states[rows], product_head, targets[rows], rows, by_logprob, by_entropy)
            del chunk  # or two chunks of logits would be alive at once
    total: Tensor = WithGradients.apply(hidden, *head, loss, gradients.parts())  # type: ignore[no-untyped-call]
    return total, Scores(outputs.logprobs, outputs.accuracy, outputs.entropy if entropy else None)


class _How(NamedTuple):
    """Options of one call."""

    spec: HeadSpec
    temperature: float
    want_entropy: bool
    want_gradients: bool
    """Whether gradients are recorded where the call is made; inside an autograd function they never are."""
    label_smoothing: float = 0.0


class _Chunk(NamedTuple):
    """One chunk after the forward sweep."""

    exponentials: Tensor
    """[n, V] e_j"""
    normaliser: Tensor
    """[n] z"""
    slope: Tensor | None
    """[n, V] derivative of the soft cap, without scale and temperature; None without a cap"""
    logprobs: Tensor
    entropy: Tensor | None
    accuracy: Tensor
    label_logprobs: Tensor
    """[n] of the smoothed label; `logprobs` without smoothing"""


def chunk_tokens(spec: HeadSpec, vocabulary: int, device: torch.device) -> int:
    """Return how many tokens are scored at once, where each takes one row of `vocabulary` logits."""
    if spec.chunk_tokens is not None:
        return spec.chunk_tokens
    room = 2**25 if device.type == "cpu" else 2**29
    return max(128, min(4096, room // (4 * vocabulary)))


def logits_of(
    hidden: Tensor, head: HeadWeights, spec: HeadSpec, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return logits [n, V] of [n, H], in float32 or better, and the derivative of their soft cap, None without one."""
    logits = hidden @ head.weight.t()
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    if head.bias is not None:
        logits += head.bias
    slope = None
    if spec.softcap is not None:
        logits = logits.mul_(spec.scale / spec.softcap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(spec.softcap / temperature)
    elif spec.scale != temperature:
        logits.mul_(spec.scale / temperature)
    return logits, slope


def _forward_chunk(hidden: Tensor, head: HeadWeights, targets: Tensor, how: _How) -> _Chunk:
    logits, slope = logits_of(hidden, head, how.spec, how.temperature)
    if how.spec.support is not None:
        logits = how.spec.support.restrict(logits, targets)
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    share = how.label_smoothing
    label = torch.lerp(chosen, logits.mean(-1), share) if share else chosen
    maximum, normaliser, mean_log, largest = _sweep_chunk(logits, how)
    log_normaliser = normaliser.log()
    entropy = log_normaliser - mean_log / normaliser if how.want_entropy else None
    logprobs = chosen - maximum - log_normaliser
    label_logprobs = label - maximum - log_normaliser if share else logprobs
    accuracy = accuracy_of(chosen, maximum, largest)
    return _Chunk(logits, normaliser, slope, logprobs, entropy, accuracy, label_logprobs)


def _sweep_chunk(logits: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if how.spec.compiled:
        return _fused(_sweep)(logits, how.want_entropy)  # type: ignore[no-any-return]
    tokens, vocabulary = logits.shape
    rows = max(1, CACHE_ELEMENTS // vocabulary if logits.device.type == "cpu" else tokens)
    parts = [_sweep(logits[start : start + rows], how.want_entropy) for start in range(0, tokens, rows)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]  # four, as each part


def _sweep(logits: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn logits into e_j in place; return m, z, sum_j e_j log e_j (or 0) and how many logits equal m, each [n]."""
    maximum, largest = count_largest(logits)
    logits.sub_(maximum[:, None]).exp_()
    mean_log = torch.special.xlogy(logits, logits).sum(-1) if want_entropy else torch.zeros_like(maximum)
    return maximum, logits.sum(-1), mean_log, largest


def _bend(exponentials: Tensor, factor: Tensor, by_entropy: Tensor) -> Tensor:
    """Turn e_j into factor e_j - by_entropy e_j log e_j in place: the entropy's part of the derivative by a logit."""
    logs = torch.special.xlogy(exponentials, exponentials)
    return exponentials.mul_(factor[:, None]).sub_(logs.mul_(by_entropy[:, None]))


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class _HeadGradients:
    """Gradients of one call: rows of hidden states as they come, head gradients summed in float32 or better."""

    def __init__(self, hidden: Tensor, head: HeadWeights, how: _How) -> None:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        self.weight = torch.zeros_like(head.weight, dtype=wide) if head.weight.requires_grad else None
        wants_bias = head.bias is not None and head.bias.requires_grad
        self.bias = torch.zeros_like(head.bias, dtype=wide) if wants_bias and head.bias is not None else None
        self._inner = how.spec.scale / how.temperature
        self._smoothing = how.label_smoothing
        self._bend = _fused(_bend) if how.spec.compiled else _bend

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None

    def add(  # noqa: PLR0913 - the operands of a formula
        self,
        chunk: _Chunk,
        hidden: Tensor,
        head: HeadWeights,
        targets: Tensor,
        rows: slice,
        by_logprob: Tensor,
        by_entropy: Tensor | None,
    ) -> None:
        """Add a chunk's part, given the loss's derivatives by its log-probabilities and entropies.

        The exponentials are consumed. The one-hot part of the derivative is added to them before they are rounded to
        the dtype of the products: of a token that is nearly certain, both parts are alike in all the digits of
        bfloat16. Row factors are applied to the narrow side of each product, so the [n, V] buffer is swept as little as
        possible.
        """
        exponentials, normaliser = chunk.exponentials, chunk.normaliser
        row_factor, at_target = -by_logprob / normaliser, -normaliser
        if by_entropy is not None and chunk.entropy is not None:
            by_mean_log = by_entropy / normaliser
            factor = row_factor - by_mean_log * (chunk.entropy - normaliser.log())
            exponentials = self._bend(exponentials, factor, by_mean_log)
            row_factor, at_target = torch.ones_like(row_factor), by_logprob
        if self._smoothing:
            exponentials.add_(at_target[:, None], alpha=self._smoothing / exponentials.shape[1])
            at_target = at_target * (1 - self._smoothing)
        exponentials.scatter_add_(1, targets[:, None], at_target[:, None])
        if chunk.slope is not None:
            exponentials = exponentials.mul_(chunk.slope)
        row_factor = row_factor * self._inner
        narrow = exponentials.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[rows] = (narrow @ head.weight).mul_(row_factor[:, None].to(hidden.dtype))
        if self.weight is not None:
            add_product(self.weight, narrow, hidden * row_factor[:, None].to(hidden.dtype))
        if self.bias is not None:
            self.bias += (exponentials * row_factor[:, None]).sum(0)

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, the sums as wide as they were added up."""
        return self.hidden, self.weight, self.bias


def _prepared(hidden: Tensor, head: HeadWeights, how: _How) -> tuple[Tensor, HeadWeights]:
    """Cast hidden states and head to the dtype of the product; requires_grad says which gradients are wanted."""
    dtype = torch.float32 if how.spec.float32_product and hidden.dtype == torch.bfloat16 else hidden.dtype

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad and how.want_gradients)

    return cast(hidden), HeadWeights(cast(head.weight), None if head.bias is None else cast(head.bias))


def _chunks(states: Tensor, head: HeadWeights, how: _How) -> Iterator[slice]:
    size = chunk_tokens(how.spec, head.weight.shape[0], states.device)
    for start in range(0, states.shape[0], size):
        yield slice(start, min(start + size, states.shape[0]))


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, head = _prepared(hidden, HeadWeights(weight, bias), how)
        outputs = _Outputs(states)
        with torch.no_grad():
            for rows in _chunks(states, head, how):
                outputs.keep(rows, _forward_chunk(states[rows], head, targets[rows], how))
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.how = how
        ctx.mark_non_differentiable(outputs.accuracy)
        return outputs.logprobs, outputs.entropy, outputs.accuracy

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor, by_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        assert weight.untyped_storage().size(), "FSDP2 freed the head, and its loss computes from it again"
        how: _How = ctx.how
        states, head = _prepared(hidden, HeadWeights(weight, bias), how)
        gradients = _HeadGradients(states, head, how)
        with torch.no_grad():
            for rows in _chunks(states, head, how):
                chunk = _forward_chunk(states[rows], head, targets[rows], how)
                by_chunk_entropy = by_entropy[rows] if how.want_entropy else None
                gradients.add(chunk, states[rows], head, targets[rows], rows, by_logprobs[rows], by_chunk_entropy)
                del chunk
        dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        return (*narrowed(list(gradients.parts()), dtypes), None, None)


class _Outputs:
    """The [N] results of all chunks."""

    def __init__(self, states: Tensor) -> None:
        self.dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
        tokens, device = states.shape[0], states.device
        self.logprobs = torch.empty(tokens, dtype=self.dtype, device=device)
        self.entropy = torch.zeros(tokens, dtype=self.dtype, device=device)
        self.accuracy = torch.empty(tokens, dtype=torch.float32, device=device)

    def keep(self, rows: slice, chunk: _Chunk) -> None:
        self.logprobs[rows] = chunk.logprobs
        self.accuracy[rows] = chunk.accuracy
        if chunk.entropy is not None:
            self.entropy[rows] = chunk.entropy


def _differentiate(terms: TokenTerms, chunk: _Chunk, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's loss and its derivatives by log-probability and entropy."""
    with torch.enable_grad():
        logprobs = chunk.label_logprobs.detach().requires_grad_()
        entropy = None if chunk.entropy is None else chunk.entropy.detach().requires_grad_()
        value = terms(logprobs, entropy, rows.start, rows.stop).sum()
        inputs = [logprobs] if entropy is None else [logprobs, entropy]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(value, inputs, allow_unused=True)
    by_logprob = torch.zeros_like(chunk.logprobs) if gradients[0] is None else gradients[0]
    return value.detach(), by_logprob, gradients[1] if len(gradients) > 1 else None


def add_product(total: Tensor, by_logits: Tensor, states: Tensor) -> None:
    """Add `by_logits.T @ states`, [n, V] and [n, H] of one dtype, to a sum [V, H] in place.

    A product in another dtype than the sum's needs memory of its own; it is formed in slices of the vocabulary.
    """
    if total.dtype == states.dtype:
        total.addmm_(by_logits.t(), states)
        return
    rows = max(1, _PRODUCT_BYTES // (states.shape[1] * states.element_size()))
    for start in range(0, total.shape[0], rows):
        part = slice(start, start + rows)
        total[part] += by_logits[:, part].t() @ states


class WithGradients(torch.autograd.Function):
    """A loss whose gradients by hidden states, weight and bias are known already, maybe in a wider dtype than theirs.

    They are narrowed in the backward pass: until then a head that is split over ranks is gathered.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd's form
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: Sequence[Tensor | None],
    ) -> Tensor:
        """Return the loss, and note its gradients."""
        ctx.parts = list(gradients)
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Any, ...]:
        """Return the gradients that were noted, times the loss's own."""
        return (*narrowed(ctx.parts, ctx.dtypes, by_loss), None, None)


def narrowed(
    parts: list[Tensor | None], dtypes: Sequence[torch.dtype | None], factor: Tensor | None = None
) -> list[Tensor | None]:
    """Return gradients in the dtypes of what they belong to, maybe times a factor; `parts` is emptied as they are."""
    results: list[Tensor | None] = []
    for dtype in dtypes:
        part = parts.pop(0)
        if part is not None:
            part = part.to(dtype)  # the wide one is freed before the next is narrowed
            part = part if factor is None else part.mul_(factor.to(part.dtype))
        results.append(part)
    return results
