"""The resumable stream of mini-batches.

A mini-batch is a fixed set of rows, a pure function of (seed, draw, configuration): the number of ranks and the token
budgets never enter it. Each rank reads and tokenises its share, lengths are gathered, a pure planner assigns packs, and
sequences move once. `state()` is a handful of integers and continues exactly at another number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.config.data import DataConfig
from holdfast.data.assembly import Layout, assemble
from holdfast.data.candidates import CandidateReader, Candidates
from holdfast.data.cutting import Rest, cut_windows
from holdfast.data.exchange import Exchange
from holdfast.errors import DataError
from holdfast.types import MiniBatch


@dataclass(frozen=True)
class Cursor:
    """Where the stream stands. Defined by global draws, never by ranks."""

    draw: int = 0
    """The next candidate."""
    epoch: int = 0
    epoch_first_draw: int = 0
    batches_in_epoch: int = 0
    rows_in_epoch: int = 0
    """Rows accepted in this epoch."""
    offset: int = 0
    """Tokens of the next row that windows have used already (packing: wrapped)."""


@dataclass(frozen=True)
class Limits:
    """How much of the data a stream serves."""

    passes: int | None = None
    """Passes over the data; None: as many as asked for."""
    batches: int | None = None
    """Batches per pass."""
    repeat: bool = False
    """Serve the first `batches` of the first pass in every pass."""


class SampleStream:
    """Mini-batches, one after the other.

    Args:
        rows: Candidate rows, shared out over the ranks.
        config: The data section.
        exchange: The ranks.
        layout: How packs are built.
        limits: How much of the data is served.
    """

    def __init__(
        self,
        rows: CandidateReader,
        config: DataConfig,
        exchange: Exchange,
        layout: Layout | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.cursor = Cursor()
        self._rows = rows
        self._order = rows.reader.order
        self._config = config
        self._exchange = exchange
        self._layout = layout or Layout()
        self._limits = limits or Limits()
        self._totals: Counter[str] = Counter()

    @property
    def fingerprint(self) -> list[str]:
        """Identity of the rows, for comparison at resume."""
        return [source.fingerprint for source in self._rows.reader.sources]

    @property
    def rows_tokenised(self) -> int:
        """Rows this rank has turned into tokens."""
        return self._rows.rows_tokenised

    def state(self) -> dict[str, Any]:
        """Return where the stream stands, as JSON-ready values."""
        return asdict(self.cursor)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same data and seed stood, at any number of ranks."""
        self.cursor = Cursor(**state)
        self._rows.reader.start_epoch(self.cursor.epoch, self.cursor.epoch_first_draw)

    def steps_per_epoch(self) -> int | None:
        """Return the batches of one epoch, rows that will be filtered or dropped included; None if unknown.

        Windows of `packing: wrapped` depend on token counts, and a batch size that changes has no one answer.
        """
        draws = self._order.epoch_draws
        if draws is None or self._config.packing == "wrapped" or self._config.batch_size_schedule:
            return self._limits.batches
        batches = -(-draws // self._config.batch_size)
        return min(batches, self._limits.batches) if self._limits.batches else batches

    @property
    def epoch(self) -> float:
        """Passes done, with the part of the current one where its length is known."""
        draws = self._order.epoch_draws
        part = 0.0 if not draws else (self.cursor.draw - self.cursor.epoch_first_draw) / draws
        return self.cursor.epoch + min(part, 1.0)

    def next(self, step: int) -> MiniBatch | None:
        """Return the mini-batch of an update (counted from 0), or None when the passes are done.

        Raises:
            DataError: A row is malformed, or a whole pass holds nothing to train on; the same error on all ranks.
        """
        while self._limits.passes is None or self.cursor.epoch < self._limits.passes:
            size = self._batch_size(step)
            found, cursor, ended = self._collect(size)
            self._check(found, cursor, ended, size)
            limited = self._limits.batches is not None and cursor.batches_in_epoch >= self._limits.batches
            self.cursor = self._next_epoch(cursor) if ended or limited else cursor
            if found.known:
                return assemble(found, self._exchange, self._config, self._layout)
        return None

    def _batch_size(self, step: int) -> int:
        schedule = self._config.batch_size_schedule
        starts = [start for start in schedule if start <= step]
        return schedule[max(starts)] if starts else self._config.batch_size

    def _epoch_end(self, cursor: Cursor) -> int | None:
        draws = self._order.epoch_draws
        return None if draws is None else cursor.epoch_first_draw + draws

    def _next_epoch(self, cursor: Cursor) -> Cursor:
        end = self._epoch_end(cursor)
        first = cursor.epoch_first_draw if self._limits.repeat else cursor.draw if end is None else end
        self._rows.reader.start_epoch(0 if self._limits.repeat else cursor.epoch + 1, first)
        return Cursor(draw=first, epoch=cursor.epoch + 1, epoch_first_draw=first)

    def _collect(self, size: int) -> tuple[Candidates, Cursor, bool]:
        """Take candidates in draw order, round by round, until the mini-batch is full or the epoch ends."""
        wrapped = self._config.packing == "wrapped"
        window = self._config.max_length
        goal = size * window if wrapped else size
        cursor, end = self.cursor, self._epoch_end(self.cursor)
        found, draw, ended, filled = Candidates(), cursor.draw, False, 0
        while filled < goal and not ended:
            missing = -(-(goal - filled) // window) if wrapped else goal - filled
            last = draw + missing if end is None else min(draw + missing, end)
            draw, ended = self._rows.round(draw, last, found)
            ended = ended or draw == end
            filled = sum(part.tokens for part in found.known) - cursor.offset if wrapped else found.rows
        rest = Rest(draw, 0)
        if wrapped:
            found, left = cut_windows(found, self._exchange, offset=cursor.offset, goal=goal, window=window)
            ended, rest = ended and left is None, left or rest
        counted = {"batches_in_epoch": cursor.batches_in_epoch + 1, "rows_in_epoch": cursor.rows_in_epoch + found.rows}
        return found, replace(cursor, draw=rest.draw, offset=rest.offset, **counted), ended

    def _check(self, found: Candidates, cursor: Cursor, ended: bool, size: int) -> None:
        self._totals.update(found.counts)
        names = ", ".join(source.name for source in self._rows.reader.sources)
        if ended and cursor.rows_in_epoch == 0:
            counted = ", ".join(f"{name}: {number}" for name, number in sorted(self._totals.items()))
            raise DataError(
                f"No row of {names} can be trained on (counted: {counted or 'no rows at all'}). "
                "Look at one with `holdfast data preview RUN.yaml`."
            )
        too_small = ended and cursor.batches_in_epoch == 1 and found.rows < size
        if too_small and not self._config.allow_partial and self._config.packing != "wrapped":
            raise DataError(
                f"{names} gives {found.rows} rows, less than one batch of {size}. Lower data.batch_size, add data, "
                "or set data.allow_partial: true."
            )
