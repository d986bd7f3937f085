"""What a form of the head's arithmetic offers: statistics of a chunk's logits, then their slopes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from holdfast.models.layers.family import HeadSpec


class ScoreOptions(NamedTuple):
    """Options of one call."""

    spec: HeadSpec
    temperature: float
    want_entropy: bool
    want_gradients: bool
    """Whether gradients are recorded where the call is made; inside an autograd function they never are."""
    label_smoothing: float = 0.0


class Statistics(NamedTuple):
    """What one sweep over a chunk's logits gives, [n] each."""

    logprobs: Tensor
    entropy: Tensor | None
    accuracy: Tensor
    label_logprobs: Tensor
    """Of the smoothed label; `logprobs` without smoothing."""


class Slopes(NamedTuple):
    """The loss's derivative by what the matrix product gave."""

    matrix: Tensor
    """[n, V]"""
    factor: Tensor | None
    """[n], by which rows of the matrix are still to be multiplied; None where they are whole."""


class Form(Protocol):
    """One way to compute both. It keeps the logits of the chunk that it saw last, and of no other."""

    tokens: int
    """Of a chunk."""
    sums_wide: bool
    """Whether products are added up in float32 without being rounded to the dtype of their factors first."""

    def statistics(self, states: Tensor, targets: Tensor) -> Statistics:
        """Multiply a chunk's states [n, H] with the head and sweep the logits once."""

    def slopes(self, statistics: Statistics, targets: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Slopes:
        """Return the slopes of the chunk whose statistics were computed last; its logits are consumed.

        Args:
            statistics: Of the chunk.
            targets: [n]
            by_logprob: [n], the loss's derivatives by the label's log-probabilities.
            by_entropy: [n], those by the entropies, None for none.
        """

    def add_product(self, total: Tensor | None, by_logits: Tensor, states: Tensor) -> Tensor:
        """Return a sum [V, H] in float32 or better with `by_logits.T @ states` added in place; None begins one."""
