"""Which row comes next: a pure function of (seed, draw), so a run continues exactly, on any number of ranks.

A draw is a position in the endless sequence of candidates. Everything about it (epoch, source, row) follows from its
number, so the state of the order is one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DECK = 4096
"""Draws after which a weighted mixture has its exact proportions again."""


@dataclass(frozen=True)
class Place:
    """Where a draw leads."""

    source: int
    turn: int
    """Draws taken from this source before this one."""


class DrawOrder:
    """Maps draws to sources, and turns of a source to rows.

    Args:
        sizes: Rows of each source; None for a stream of unknown length.
        weights: Relative share of draws of each source, or None to take every row once per epoch.
        seed: Of every shuffle.
        shuffle: Permute rows, anew in each epoch.
        block: Rows of a stream that are shuffled together.
    """

    def __init__(
        self,
        sizes: Sequence[int | None],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 10_000,
    ) -> None:
        self.sizes = list(sizes)
        self.seed = seed
        self.shuffle = shuffle
        self.block = block
        self._permutations: dict[tuple[int, int, int], NDArray[np.int64]] = {}
        self._deck_counts = _proportions(weights, DECK) if weights is not None and len(sizes) > 1 else None
        self._last_deck: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    @property
    def epoch_draws(self) -> int | None:
        """Draws in one epoch: all rows of all sources; None when a stream's end is not known."""
        if any(size is None for size in self.sizes):
            return None
        return sum(size for size in self.sizes if size is not None)

    def place(self, draw: int) -> Place:
        """Return the source a draw goes to, and how many draws that source had before."""
        if len(self.sizes) == 1:
            return Place(0, draw)
        if self._deck_counts is not None:
            return self._from_deck(draw)
        total = self.epoch_draws
        assert total is not None, "unweighted mixtures have known sizes"
        epoch, position = divmod(draw, total)
        row = int(self._permutation(len(self.sizes), epoch, total)[position])
        for source, size in enumerate(self.sizes):
            assert size is not None
            if row < size:
                return Place(source, epoch * size + row)
            row -= size
        raise AssertionError("a permutation holds only rows")

    def turns_before(self, draw: int) -> list[int]:
        """Return how many of the draws before this one went to each source."""
        if len(self.sizes) == 1:
            return [draw]
        if self._deck_counts is None:
            return [0] * len(self.sizes)  # only mixtures with a deck can hold streams, and only streams ask
        deck, position = divmod(draw, DECK)
        cards = self._deck(deck)[:position]
        return [deck * int(count) + int((cards == source).sum()) for source, count in enumerate(self._deck_counts)]

    def row(self, source: int, turn: int) -> int:
        """Return the row of a source with an index that its turn leads to."""
        size = self.sizes[source]
        assert size is not None, "streams are read through their blocks"
        epoch, position = divmod(turn, size)
        if len(self.sizes) > 1 and self._deck_counts is None:
            return position  # the permutation over all sources has chosen the row already
        return int(self._permutation(source, epoch, size)[position])

    def within_block(self, source: int, epoch: int, block: int, rows: int) -> NDArray[np.int64]:
        """Return the order of the rows of one block of a stream; `rows` is how many it holds."""
        return self._permutation(source, epoch * 1_000_003 + block + 1, rows)

    def _permutation(self, source: int, epoch: int, size: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(size)
        key = (source, epoch, size)
        if key not in self._permutations:
            # Two epochs are alive at a boundary, no more: a permutation of 10^8 rows is 0.8 GB.
            for old in [known for known in self._permutations if known[0] == source][:-1]:
                del self._permutations[old]
            generator = np.random.default_rng([self.seed, source, epoch])
            self._permutations[key] = generator.permutation(size)
        return self._permutations[key]

    def _from_deck(self, draw: int) -> Place:
        assert self._deck_counts is not None
        deck, position = divmod(draw, DECK)
        cards = self._deck(deck)
        source = int(cards[position])
        before = int((cards[:position] == source).sum())
        return Place(source, deck * int(self._deck_counts[source]) + before)

    def _deck(self, number: int) -> NDArray[np.int64]:
        assert self._deck_counts is not None
        if self._last_deck[0] != number:
            cards = np.repeat(np.arange(len(self.sizes)), self._deck_counts)
            self._last_deck = (number, cards[np.random.default_rng([self.seed, 7, number]).permutation(DECK)])
        return self._last_deck[1]


def _proportions(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Split `total` in proportion to weights by largest remainder; every source gets at least one."""
    exact = np.asarray(weights) / np.sum(weights) * total
    counts: NDArray[np.int64] = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() != total:
        step = 1 if counts.sum() < total else -1
        counts[int(np.argmax((exact - counts) * step))] += step
    return counts
