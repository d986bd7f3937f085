"""What the data layer needs from the ranks: gather small facts, swap sequences. Implemented above, over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """Collectives among the ranks that share a mini-batch; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, by rank."""

    def swap(self, outgoing: Sequence[T]) -> list[T]:
        """Send outgoing[r] to rank r and return what every rank sent here, by rank."""
