"""The sweeps in torch's operations: on any device, in float32 or float64, with smoothed labels.

A chunk's logits live in one buffer that is turned in place into exp(logit - max). From that buffer, its row sums and
its row maxima follow the log-probability, the entropy and every gradient:

    log p_t   = l_t - m - log z            z = sum_j e_j,  e_j = exp(l_j - m)
    H         = log z - (1/z) sum_j e_j log e_j
    dlog p_t / dl_j = [j = t] - e_j / z
    dH / dl_j       = -(e_j / z) (log e_j - log z + H)

Labels smoothed by e stand for the log-probability s = (1 - e) log p_t + e mean_j log p_j over V tokens, with
ds / dl_j = (1 - e) [j = t] + e / V - e_j / z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.models.chunks.form import ScoreOptions, Slopes, Statistics
from holdfast.models.chunks.logits import (
    CACHE_ELEMENTS,
    HeadWeights,
    accuracy_of,
    add_product,
    chunk_tokens,
    count_largest,
    logits_of,
)


class _Swept(NamedTuple):
    """One chunk after the forward sweep."""

    exponentials: Tensor
    """[n, V] e_j"""
    normaliser: Tensor
    """[n] z"""
    slope: Tensor | None
    """[n, V] derivative of the soft cap, without scale and temperature; None without a cap"""


class TorchForm:
    """A `Form` for a head in the dtype of the product."""

    sums_wide = False

    def __init__(self, head: HeadWeights, options: ScoreOptions) -> None:
        self.tokens = chunk_tokens(options.spec, head.weight.shape[0], head.weight.device)
        self._head, self._options = head, options
        self._swept: _Swept | None = None

    def statistics(self, states: Tensor, targets: Tensor) -> Statistics:
        """Return the statistics of a chunk."""
        self._swept = None  # or two chunks of logits would be alive at once
        spec, share = self._options.spec, self._options.label_smoothing
        logits, slope = logits_of(states, self._head, spec, self._options.temperature)
        if spec.support is not None:
            logits = spec.support.restrict(logits, targets)
        chosen = logits.gather(1, targets[:, None]).squeeze(1)
        label = torch.lerp(chosen, logits.mean(-1), share) if share else chosen
        maximum, normaliser, mean_log, largest = _sweep_blocks(logits, want_entropy=self._options.want_entropy)
        log_normaliser = normaliser.log()
        entropy = log_normaliser - mean_log / normaliser if self._options.want_entropy else None
        logprobs = chosen - maximum - log_normaliser
        self._swept = _Swept(logits, normaliser, slope)
        label_logprobs = label - maximum - log_normaliser if share else logprobs
        return Statistics(logprobs, entropy, accuracy_of(chosen, maximum, largest), label_logprobs)

    def slopes(self, statistics: Statistics, targets: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Slopes:
        """Return the slopes of that chunk, in the dtype of its logits.

        The one-hot part of the derivative is added to the exponentials before they are rounded to the dtype of the
        products: of a token that is nearly certain, both parts are alike in all the digits of bfloat16. Factors of rows
        are left to the narrow side of each product, so the [n, V] buffer is swept as little as possible.
        """
        assert self._swept is not None, "a chunk's slopes follow its statistics, and follow them once"
        (exponentials, normaliser, slope), self._swept = self._swept, None
        factor, at_target = -by_logprob / normaliser, -normaliser
        if by_entropy is not None and statistics.entropy is not None:
            by_mean_log = by_entropy / normaliser
            bent = factor - by_mean_log * (statistics.entropy - normaliser.log())
            exponentials = _bend(exponentials, bent, by_mean_log)
            factor, at_target = torch.ones_like(factor), by_logprob
        if share := self._options.label_smoothing:
            exponentials.add_(at_target[:, None], alpha=share / exponentials.shape[1])
            at_target = at_target * (1 - share)
        exponentials.scatter_add_(1, targets[:, None], at_target[:, None])
        if slope is not None:
            exponentials = exponentials.mul_(slope)
        return Slopes(exponentials, factor * (self._options.spec.scale / self._options.temperature))

    def add_product(self, total: Tensor | None, by_logits: Tensor, states: Tensor) -> Tensor:
        """Return a sum with a product added; one in a narrower dtype is rounded to it first."""
        return add_product(total, by_logits, states)


def _sweep_blocks(logits: Tensor, *, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, vocabulary = logits.shape
    rows = max(1, CACHE_ELEMENTS // vocabulary if logits.device.type == "cpu" else tokens)
    blocks = [_sweep(logits[start : start + rows], want_entropy=want_entropy) for start in range(0, tokens, rows)]
    return tuple(torch.cat(block) for block in zip(*blocks, strict=True))  # type: ignore[return-value]  # four, as each block


def _sweep(logits: Tensor, *, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn logits into e_j in place; return m, z, sum_j e_j log e_j (or 0) and how many logits equal m, each [n]."""
    maximum, largest = count_largest(logits)
    logits.sub_(maximum[:, None]).exp_()
    mean_log = torch.special.xlogy(logits, logits).sum(-1) if want_entropy else torch.zeros_like(maximum)
    return maximum, logits.sum(-1), mean_log, largest


def _bend(exponentials: Tensor, factor: Tensor, by_entropy: Tensor) -> Tensor:
    """Turn e_j into factor e_j - by_entropy e_j log e_j in place: the entropy's part of the derivative by a logit."""
    logs = torch.special.xlogy(exponentials, exponentials)
    return exponentials.mul_(factor[:, None]).sub_(logs.mul_(by_entropy[:, None]))
