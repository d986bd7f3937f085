"""Where a stream of batches stands, how much of its data it serves, and the pass that it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import ConfigDict, Field

from holdfast.config.base import SavedCount


@dataclass(frozen=True)
class Cursor:
    """The position of a stream, in global draws and independent of ranks."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    draw: SavedCount
    """The next candidate."""
    epoch: SavedCount
    epoch_first_draw: SavedCount
    batches_in_epoch: SavedCount
    sequences_in_epoch: SavedCount
    """All that its rows gave: two of a pair, and two where a row brings its prompt with another row's answer."""
    offset: SavedCount
    """Tokens of the next row that windows have used already (packing: wrapped)."""

    def after_batch(self, draw: int, offset: int, sequences: int) -> Cursor:
        """Return the cursor after a batch of so many sequences, which ends before this draw and offset."""
        return replace(
            self,
            draw=draw,
            offset=offset,
            batches_in_epoch=self.batches_in_epoch + 1,
            sequences_in_epoch=self.sequences_in_epoch + sequences,
        )


@dataclass(frozen=True)
class StreamState:
    """The state of a stream in a checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    cursor: Cursor
    sizes: list[SavedCount | None]
    """Number of rows of each source; None while the end of a stream is not known."""
    seen: Annotated[list[SavedCount], Field(min_length=2, max_length=2)]
    """Number of rows read, and of the tokens of all their sequences."""


@dataclass(frozen=True)
class StreamLimits:
    """How much of the data a stream serves."""

    passes: float | None = None
    """Passes over the data, the last one perhaps in part; None: without end."""
    batches: int | None = None
    """Batches per pass."""
    repeat: bool = False
    """Serve the first pass again and again."""
    draws: int | None = None
    """Candidates per pass: only the first rows."""
    by_rows: bool = False
    """Part of a pass is a part of its rows: batches have another size than was configured."""

    def of_pass(self, rows: int | None) -> int | None:
        """Return the draws of a whole pass over so many rows; None while a stream's end is not known."""
        return min((bound for bound in (rows, self.draws) if bound is not None), default=None)

    def done(self, cursor: Cursor, rows: int | None) -> float:
        """Return the passes done, with the part of the current one where its length is known."""
        draws = self.of_pass(rows)
        by_draws = (cursor.draw - cursor.epoch_first_draw) / draws if draws else 0.0
        by_batches = cursor.batches_in_epoch / self.batches if self.batches else 0.0
        return cursor.epoch + min(max(by_draws, by_batches), 1.0)

    def current(self, cursor: Cursor, rows: int | None, batches: int | None) -> Pass:
        """Return the pass that a cursor stands in.

        Args:
            cursor: Any position in the pass.
            rows: Of the data; None while a stream's end is not known.
            batches: Of a whole pass; None where nobody knows.
        """
        share = 1.0 if self.passes is None else min(1.0, self.passes - cursor.epoch)
        draws, most = self.of_pass(rows), self.batches
        if share < 1 and batches is not None and not self.by_rows:
            most = _part(share, batches)
        elif share < 1 and most is None and draws is not None:
            draws = min(draws, _part(share, draws))
        first = cursor.epoch_first_draw
        following = first if rows is None or self.repeat else first + rows
        return Pass(first, draws, most, share, following, self.repeat)


@dataclass(frozen=True)
class Pass:
    """One pass over the data: its draws, and how many batches may be made of them.

    With 10 rows, `batch_size: 4` and `epochs: 1.5`, the first pass has 10 draws from 0 on and any number of batches:
    they are 3. The second has 10 draws from 10 on and at most 2 batches: half of 3, rounded up. It is the last.
    """

    first: int
    """Its first draw."""
    draws: int | None
    """How many it has; None while a stream's end is not known."""
    batches: int | None
    """How many it has at most; None where the draws alone end it."""
    share: float
    """How much of a pass it is: 1, or less for the last pass, or 0 and less behind it."""
    following: int
    """The draw that the next pass does not begin before."""
    repeats: bool
    """Whether the next pass has the same draws again."""

    @property
    def end(self) -> int | None:
        """The draw behind its last one, where it is known."""
        return None if self.draws is None else self.first + self.draws

    def has_ended(self, cursor: Cursor) -> bool:
        """Say whether no draw is left."""
        return self.end is not None and cursor.draw >= self.end

    def is_served(self, cursor: Cursor) -> bool:
        """Say whether no draw is left, or no further batch may be made."""
        return self.has_ended(cursor) or (self.batches is not None and cursor.batches_in_epoch >= self.batches)

    def is_over(self, cursor: Cursor) -> bool:
        """Say whether it is served and no pass follows."""
        return self.share < 1 and (self.share <= 0 or self.is_served(cursor))

    def after(self, cursor: Cursor) -> Cursor:
        """Return where the stream stands after a batch that ends at a cursor: in the next pass, if this one is served.

        Behind a part of a pass nothing follows.
        """
        if self.share < 1 or not self.is_served(cursor):
            return cursor
        if self.repeats:
            return Cursor(self.first, cursor.epoch + 1, self.first, 0, 0, 0)
        first = max(cursor.draw, self.following)
        # A window may have cut the row that the next pass begins with.
        return Cursor(first, cursor.epoch + 1, first, 0, 0, cursor.offset if first == cursor.draw else 0)


def _part(share: float, whole: int) -> int:
    """Return a share of a whole number, rounded up; 0.3 * 10 is a little more than 3 in floating point."""
    return math.ceil(round(share * whole, 6))
