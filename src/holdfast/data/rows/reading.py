"""The order of rows, and reading them by draw, from sources with an index and from streams.

A draw is a position in the endless sequence of candidates. Its source, pass and row are a pure function of its number,
the seed and the sizes of the sources, so that a run continues exactly on any number of ranks. The size of a stream is
learned when its end is reached.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.data.rows.json_rows import BadRow
from holdfast.data.rows.rows import Row, Source
from holdfast.errors import DataError

DECK = 4096
"""Draws after which a weighted mixture has its exact proportions again."""

_PERMUTATIONS_KEPT = 2
"""Permutations kept per source: `packing: wrapped` goes back to the row it cut, maybe of the previous pass."""


@dataclass(frozen=True)
class DrawPlace:
    """The source, pass and row of a draw."""

    source: int
    turn: int
    """Draws taken from this source before this one."""
    row: int | None
    """Row of a source with an index; a stream finds its row by the turn."""


def draws_of(sizes: Sequence[int | None]) -> int | None:
    """Return the rows of all sources together; None while the end of one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


class DrawOrder:
    """Maps draws to rows.

    Args:
        sizes: Number of rows of each source; None for a stream whose end is not known yet.
        weights: Relative share of draws of each source; None to take every row once per epoch.
        seed: Seed of all shuffles.
        shuffle: Whether to permute rows, differently in each pass, and to interleave sources at random.
        block: Number of rows of a stream that are shuffled together.
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
        return draws_of(self.sizes)

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

    def _permuted(self, name: str, epoch: int, position: int, size: int) -> int:
        if not self._shuffle:
            return position
        permutations = self._permutations.setdefault(name, {})
        if epoch not in permutations:
            if len(permutations) == _PERMUTATIONS_KEPT:
                del permutations[next(iter(permutations))]
            permutations[epoch] = self._permutation(f"{name}:{epoch}", size)
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


_HASHED_AT_ONCE = 65_536


class EndOfStream(Exception):  # noqa: N818 - a signal, not an error
    """Raised at the first turn for which a stream has no row: that turn is its size."""

    def __init__(self, source: int, size: int) -> None:
        super().__init__(source, size)
        self.source = source
        self.size = size


class SourceRow(NamedTuple):
    """A row, with its source and its name."""

    source: Source
    name: str
    """For messages: source and number of the row in the file."""
    row: Row


class HeldOut:
    """The rows of a source that do, or do not, belong to the validation split.

    A row belongs to it by a hash of its index, so the split needs no state, stays the same when rows are appended, and
    is known for a stream before it is read.

    Args:
        source: All rows.
        share: Of the rows that belong to the split, above 0 and below 1.
        keep: Serve the split; off: serve the rest.

    Raises:
        DataError: Nothing is left.
    """

    def __init__(self, source: Source, share: float, *, keep: bool) -> None:
        self.source = source
        self.share = share
        self.keep = keep
        self.name = source.name
        self.fingerprint = f"{source.fingerprint}:{'validation' if keep else 'train'}:{share}"
        self._rows = None if source.size is None else np.flatnonzero(self._members(0, source.size))
        self.size = None if self._rows is None else int(self._rows.size)
        if self.size == 0:
            purpose = "the validation split" if keep else "training"
            raise DataError(
                f"data.validation_split={share} of the {source.size} rows of {source.name} leaves none for {purpose}. "
                "Choose another share, or name an evaluation set under evaluation.sets."
            )

    def number(self, index: int) -> int:
        """Return where a row of the split stands among all rows; only for a source with an index."""
        assert self._rows is not None
        return int(self._rows[index])

    def row(self, index: int) -> Row:
        """Return a row by its index within the split."""
        return self.source.row(self.number(index))

    def scan(self, start: int) -> Iterator[Row]:
        """Yield the rows of the split from the start-th on."""
        return (row for _, row in self.numbered(start))

    def numbered(self, start: int) -> Iterator[tuple[int, Row]]:
        """Yield the rows of the split from the start-th on, each with its number among all rows."""
        numbers = self._numbers(start)
        target = first = next(numbers)
        for number, row in enumerate(self.source.scan(first), start=first):
            if number == target:
                yield number, row
                target = next(numbers)

    def _numbers(self, start: int) -> Iterator[int]:
        """Yield the numbers of the split's rows from the start-th on, from hashes alone; there is no end to them."""
        for first in count(0, _HASHED_AT_ONCE):
            numbers = np.flatnonzero(self._members(first, first + _HASHED_AT_ONCE))
            yield from (first + int(number) for number in numbers[start:])
            start = max(0, start - numbers.size)

    def _members(self, start: int, end: int) -> NDArray[np.bool_]:
        """Hash row numbers (splitmix64, Steele et al. 2014) and compare with the share."""
        with np.errstate(over="ignore"):
            value = np.arange(start, end, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value ^= value >> np.uint64(31)
        held_out = value.astype(np.float64) / 2.0**64 < self.share
        return held_out if self.keep else ~held_out


class RowReader:
    """Rows by draw, over all sources of a data set."""

    def __init__(self, sources: Sequence[Source], order: DrawOrder) -> None:
        self.sources = list(sources)
        self.order = order
        self._streams = {
            index: _BlockStream(source, order, index) for index, source in enumerate(sources) if source.size is None
        }

    def read(self, draw: int) -> SourceRow:
        """Return the row of a draw.

        Raises:
            EndOfStream: A stream ends before it.
            DataError: The row cannot be read.
        """
        position = self.order.place(draw)
        source = self.sources[position.source]
        if source.size is not None:
            assert position.row is not None
            return _at(source, position.row)
        number, row = self._streams[position.source].row(position.turn)
        name = f"{source.name} row {number}"
        if isinstance(row, BadRow):
            raise DataError(f"{name}: {row.reason}")
        return SourceRow(source, name, row)

    def learn_size(self, source: int, size: int) -> None:
        """Note the size of a stream whose end was met; from there on it is passed over again and again.

        Raises:
            DataError: The stream has no rows.
        """
        if size == 0:
            raise DataError(f"{self.sources[source].name} has no rows.")
        self.order.sizes[source] = size


def _at(source: Source, index: int) -> SourceRow:
    number = source.number(index) if isinstance(source, HeldOut) else index
    return SourceRow(source, f"{source.name} row {number}", source.row(index))


class _BlockStream:
    """A stream cut into blocks that are shuffled one by one, so that a position needs no memory of what came before.

    A classical shuffle buffer cannot be resumed without saving its rows; a block's order follows from its number.
    """

    def __init__(self, source: Source, order: DrawOrder, index: int) -> None:
        self._source = source
        self._order = order
        self._index = index
        self._at = (-1, -1)
        """Pass and number of the block in memory."""
        self._rows: list[tuple[int, Row]] = []
        self._permutation: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._iterator: Iterator[tuple[int, Row]] = iter(())

    def row(self, turn: int) -> tuple[int, Row]:
        """Return the number of the row that a turn leads to, and the row."""
        epoch, position = self._order.pass_of(self._index, turn)
        block, offset = divmod(position, self._order.block)
        if (epoch, block) != self._at:
            self._open(epoch, block)
        if offset >= len(self._rows):
            if self._order.sizes[self._index] is None:
                raise EndOfStream(self._index, turn)
            raise DataError(
                f"{self._source.name} had {self._order.sizes[self._index]} rows in its first pass and has fewer now. "
                "A file must not change while a run reads it."
            )
        return self._rows[int(self._permutation[offset])]

    def _open(self, epoch: int, block: int) -> None:
        size = self._order.block
        if epoch == self._at[0] and block > self._at[1]:
            between = (block - self._at[1] - 1) * size
            deque(islice(self._iterator, between), maxlen=0)
        else:
            source, start = self._source, block * size
            if isinstance(source, HeldOut):
                self._iterator = source.numbered(start)
            else:
                self._iterator = enumerate(source.scan(start), start=start)
        self._rows = list(islice(self._iterator, size))
        self._permutation = self._order.within_block(self._index, epoch, block, len(self._rows))
        self._at = (epoch, block)
