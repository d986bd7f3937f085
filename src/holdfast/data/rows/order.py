"""Which row comes next: a pure function of (seed, draw), so a run continues exactly, on any number of ranks.

A draw is a position in the endless sequence of candidates. Everything about it (source, pass, row) follows from its
number and the sizes of the sources; the size of a stream joins them when its end is met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DECK = 4096
"""Draws after which a weighted mixture has its exact proportions again."""

_PERMUTATIONS_KEPT = 2
"""Of each source: `packing: wrapped` goes back to the row it cut, which may lie before the end of a pass."""


@dataclass(frozen=True)
class DrawPlace:
    """Where a draw leads."""

    source: int
    turn: int
    """Draws taken from this source before this one."""
    row: int | None
    """Row of a source with an index; a stream finds its row by the turn."""


class DrawOrder:
    """Maps draws to rows.

    Args:
        sizes: Rows of each source; None for a stream whose end nobody has seen yet.
        weights: Relative share of draws of each source, or None to take every row once per epoch.
        seed: Of every shuffle.
        shuffle: Permute rows, anew in each pass, and sources among each other.
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
        self.block = block if shuffle else 1
        self._seed = seed
        self._shuffle = shuffle
        self._is_mixture = len(self.sizes) > 1
        self._deck_counts = deck_counts(weights) if weights is not None and self._is_mixture else None
        self._deck: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))
        self._permutations: dict[str, dict[int, NDArray[np.uint32]]] = {}

    @property
    def epoch_draws(self) -> int | None:
        """Draws in one epoch: as many as there are rows in all sources; None while a stream's end is not known."""
        sizes = [size for size in self.sizes if size is not None]
        return sum(sizes) if len(sizes) == len(self.sizes) else None

    def place(self, draw: int) -> DrawPlace:
        """Return where a draw leads."""
        if not self._is_mixture:
            return self._turn(0, draw)
        if self._deck_counts is not None:
            number, position = divmod(draw, DECK)
            cards = self._cards(number)
            source = int(cards[position])
            earlier = int((cards[:position] == source).sum())
            return self._turn(source, number * int(self._deck_counts[source]) + earlier)
        total = self.epoch_draws
        assert total is not None, "a stream is mixed by weights only"
        epoch, position = divmod(draw, total)
        row = self._permuted("all", epoch, position, total)
        for source, size in enumerate(self.sizes):
            assert size is not None
            if row < size:
                return DrawPlace(source, epoch * size + row, row)
            row -= size
        raise AssertionError("a permutation holds only rows")

    def pass_of(self, source: int, turn: int) -> tuple[int, int]:
        """Return which pass over a source a turn belongs to, and how many turns of that pass come before it."""
        size = self.sizes[source]
        return (0, turn) if size is None else divmod(turn, size)

    def within_block(self, source: int, epoch: int, block: int, rows: int) -> NDArray[np.uint32]:
        """Return the order of the rows of one block of a stream; `rows` is how many it holds."""
        return self._permutation(f"block:{source}:{epoch}:{block}", rows)

    def _turn(self, source: int, turn: int) -> DrawPlace:
        size = self.sizes[source]
        if size is None:
            return DrawPlace(source, turn, None)
        epoch, position = divmod(turn, size)
        return DrawPlace(source, turn, self._permuted(f"rows:{source}", epoch, position, size))

    def _permuted(self, what: str, epoch: int, position: int, size: int) -> int:
        if not self._shuffle:
            return position
        permutations = self._permutations.setdefault(what, {})
        if epoch not in permutations:
            if len(permutations) == _PERMUTATIONS_KEPT:
                del permutations[next(iter(permutations))]
            permutations[epoch] = self._permutation(f"{what}:{epoch}", size)
        return int(permutations[epoch][position])

    def _permutation(self, key: str, size: int) -> NDArray[np.uint32]:
        values = np.arange(size, dtype=np.uint32)  # 4 bytes a row: 10^8 rows are 0.4 GB
        if self._shuffle:
            _frozen_random(self._seed, key).shuffle(values)
        return values

    def _cards(self, number: int) -> NDArray[np.int64]:
        """Return the source of every draw of one deck."""
        assert self._deck_counts is not None
        if self._deck[0] != number:
            # Each source's cards at equal distances: without a shuffle, the deck is spread as evenly as can be.
            height = np.concatenate([(np.arange(count) + 0.5) / count for count in self._deck_counts])
            cards = np.repeat(np.arange(len(self.sizes)), self._deck_counts)[np.argsort(height, kind="stable")]
            self._deck = (number, cards[self._permutation(f"deck:{number}", DECK)])
        return self._deck[1]


def _frozen_random(*key: object) -> np.random.RandomState:
    """Return a generator for a key; numpy keeps the stream of RandomState for ever (NEP 19), newer ones may change."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


def deck_counts(weights: Sequence[float]) -> NDArray[np.int64]:
    """Share out a deck's draws in proportion to weights, by largest remainder; every source gets at least one."""
    exact = np.asarray(weights) / np.sum(weights) * DECK
    counts: NDArray[np.int64] = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() < DECK:
        counts[int(np.argmax(exact - counts))] += 1
    while counts.sum() > DECK:
        counts[int(np.argmax(np.where(counts > 1, counts - exact, -np.inf)))] -= 1
    return counts
