"""Read the row a draw leads to, from sources with an index and from streams alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from holdfast.data.order import DrawOrder
from holdfast.data.rows import Row, Source


class EndOfStream(Exception):  # noqa: N818 - a signal, not an error
    """The stream ends before this draw."""


class HeldOut:
    """The rows of a source that do, or do not, belong to the validation split.

    A row belongs to it by a hash of its index, so the split needs no state, stays the same when rows are appended, and
    is known for a stream before it is read.
    """

    def __init__(self, source: Source, share: float, *, keep: bool) -> None:
        self.source = source
        self.share = share
        self.keep = keep
        self.name = source.name
        self.fingerprint = f"{source.fingerprint}:{'validation' if keep else 'train'}:{share}"
        self._rows = np.flatnonzero(self._member(0, source.size)) if source.size is not None else None
        self.size = None if self._rows is None else int(self._rows.size)

    def row(self, index: int) -> Row:
        """Return a row by its index within the split."""
        assert self._rows is not None
        return self.source.row(int(self._rows[index]))

    def scan(self, start: int) -> Iterator[Row]:
        """Yield the rows of the split from the start-th on."""
        raw, kept, block = 0, 0, 65_536
        while True:  # find the raw index of the start-th kept row from hashes alone
            members = self._member(raw, raw + block)
            if kept + int(members.sum()) > start:
                raw += int(np.flatnonzero(members)[start - kept])
                break
            kept += int(members.sum())
            raw += block
        for index, row in enumerate(self.source.scan(raw), start=raw):
            if self._member(index, index + 1)[0]:
                yield row

    def _member(self, start: int, end: int) -> NDArray[np.bool_]:
        """Hash row indices (splitmix64, Steele et al. 2014) and compare with the share."""
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
            index: _BlockStream(source.scan, order, index)
            for index, source in enumerate(sources)
            if source.size is None
        }

    @property
    def has_streams(self) -> bool:
        """Whether some source can be read front to back only."""
        return bool(self._streams)

    def read(self, draw: int) -> tuple[Source, str, Row]:
        """Return the source, a name for error messages and the row.

        Raises:
            EndOfStream: A stream has no row left in this epoch.
        """
        place = self.order.place(draw)
        source = self.sources[place.source]
        if source.size is None:
            return source, f"{source.name} row {place.turn}", self._streams[place.source].row(place.turn)
        index = self.order.row(place.source, place.turn)
        return source, f"{source.name} row {index}", source.row(index)

    def start_epoch(self, epoch: int, first_draw: int) -> None:
        """Tell streams that draws from `first_draw` on start again at their first row."""
        turns = self.order.turns_before(first_draw)
        for index, stream in self._streams.items():
            stream.start_epoch(epoch, turns[index])


class _BlockStream:
    """A stream cut into blocks that are shuffled one by one, so that a position needs no memory of what came before.

    A classical shuffle buffer cannot be resumed without saving its rows; a block's order follows from its number.
    """

    def __init__(self, scan: Callable[[int], Iterator[Row]], order: DrawOrder, source: int) -> None:
        self._scan = scan
        self._order = order
        self._source = source
        self._epoch = 0
        self._first_turn = 0
        self._block = -1
        self._rows: list[Row] = []
        self._permutation: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._iterator: Iterator[Row] | None = None

    def start_epoch(self, epoch: int, first_turn: int) -> None:
        if (epoch, first_turn) != (self._epoch, self._first_turn):
            self._epoch, self._first_turn, self._block, self._iterator = epoch, first_turn, -1, None

    def row(self, turn: int) -> Row:
        block, position = divmod(turn - self._first_turn, self._order.block)
        if block != self._block:
            self._open(block)
        if position >= len(self._rows):
            raise EndOfStream
        return self._rows[int(self._permutation[position])]

    def _open(self, block: int) -> None:
        if self._iterator is None or block != self._block + 1:
            self._iterator = iter(self._scan(block * self._order.block))
        self._rows = list(islice(self._iterator, self._order.block))
        self._permutation = self._order.within_block(self._source, self._epoch, block, len(self._rows))
        self._block = block
