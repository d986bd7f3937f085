"""What ranks exchange that share a row (context parallelism); `parallel/context.py` does it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowExchange(Protocol):
    """The ranks that share a row, each with a span of its positions."""

    size: int
    """Number of ranks."""
    rank: int
    """This rank in the group, from 0."""

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange [1, heads, span, size] of this rank's span for [1, heads / ranks, T, size] of the whole row."""

    def keys_to_heads(self, tensor: Tensor) -> Tensor:
        """Do the same with keys or values, repeated where there are fewer heads than ranks."""

    def to_span(self, tensor: Tensor) -> Tensor:
        """Exchange [1, T, heads / ranks, size] for [1, span, heads, size]."""

    def head_values(self, tensor: Tensor) -> Tensor:
        """Return the values of this rank's heads of [heads]."""

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, differentiable."""
