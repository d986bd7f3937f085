"""The resumable stream of mini-batches.

A mini-batch is a fixed set of rows, a pure function of (seed, draw, configuration), at any number of ranks. Each rank
reads and tokenises a share of the rows, lengths are gathered, a pure planner assigns packs, and each sequence is sent
once. `state()` is a few integers, from which the stream continues exactly at any number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Generic, TypeVar

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import BAD_ROWS, CandidateReader, Candidates, NextToken, cut_windows
from holdfast.data.batches.cursor import Cursor, StreamLimits
from holdfast.data.content.lengths import lost_rows
from holdfast.data.rows.reading import draws_of
from holdfast.data.rows.rows import Source
from holdfast.data.tokens.chat import S
from holdfast.errors import DataError
from holdfast.types import Example, MiniBatch

T = TypeVar("T")

_COUNTED_AT_ONCE = 8192


Cut = Callable[[Candidates[S], int, int], tuple[Candidates[S], NextToken | None]]
"""Cuts candidates into windows of `goal` tokens together: function(found, tokens of its first row used, goal)."""


@dataclass(frozen=True)
class _BatchAhead(Generic[T]):
    """A batch that was read before its step."""

    rows: int
    """How many it was read with."""
    batch: T | None
    cursor: Cursor
    """Where the stream stands after it."""
    totals: tuple[int, int]
    sizes: tuple[int | None, ...]
    """Of the sources, as far as they were known after it."""


class BatchStream(ABC, Generic[S, T]):
    """A resumable stream of batches; a subclass turns the candidates of a batch into the batch.

    Args:
        rows: Reads candidate rows, distributed over the ranks.
        config: The section `data`.
        limits: How much of the data is served.
        cut: Cuts the candidates of a batch into windows; without it, batches consist of whole rows.

    Raises:
        DataError: The limits, or a batch size, cannot be kept with this data.
    """

    def __init__(
        self,
        rows: CandidateReader[S],
        config: DataConfig,
        limits: StreamLimits | None = None,
        cut: Cut[S] | None = None,
    ) -> None:
        self.cursor = Cursor(0, 0, 0, 0, 0, 0)
        self.rows: CandidateReader[S] = rows
        """Reads the rows; what it has read ahead is the stream's affair."""
        self._order = rows.reader.order
        self._config = config
        self._limits = limits or StreamLimits()
        self._cut: Cut[S] | None = cut
        self._counts: Counter[str] = Counter()
        self._kept: int | None = None
        """Rows of a pass that are trained on, where somebody counted."""
        self._totals = (0, 0)
        """Rows and tokens of all their sequences, read so far: how many tokens a row brings on average."""
        self._ahead: list[_BatchAhead[T]] = []
        """The next batches, as far as they were read early."""
        self._sizes = tuple(self._order.sizes)
        """Of the sources, as far as they were known behind the batch that was handed out last."""
        self._refuse_what_cannot_be()

    @abstractmethod
    def _batch_of(self, candidates: Candidates[S]) -> T:
        """Make a batch of its candidates."""

    @property
    def bad_rows(self) -> int:
        """Rows left out since this start because they cannot be read."""
        return self._counts[BAD_ROWS]

    @property
    def sources(self) -> Sequence[Source]:
        """The rows, by source."""
        return self.rows.reader.sources

    @property
    def fingerprint(self) -> list[str]:
        """Identity of the rows, for comparison at resume."""
        return [source.fingerprint for source in self.sources]

    @property
    def rows_tokenised(self) -> int:
        """Rows this rank has turned into tokens."""
        return self.rows.rows_tokenised

    def state(self) -> dict[str, Any]:
        """Return where the stream stands, as JSON-ready values."""
        return {"cursor": asdict(self.cursor), "sizes": list(self._sizes), "seen": list(self._totals)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same data and seed stood, at any number of ranks."""
        self.cursor = Cursor(**state["cursor"])
        self._ahead = []
        # How far windows look ahead decides when a stream's end is learned.
        self._totals = (state["seen"][0], state["seen"][1])
        # Only streams: the size of other sources is what it is, and whether it may change is the caller's to judge.
        for index, source in enumerate(self.rows.reader.sources):
            if source.size is None:
                self._order.sizes[index] = state["sizes"][index]
        self._sizes = tuple(self._order.sizes)

    def count_rows(self, *, tokens: bool) -> None:
        """Count the rows of the first pass that are not left out, so that the number of its batches is exact.

        It asks the filter about every row. A stream whose end is not known is not counted.

        Args:
            tokens: Make tokens of the rows, too, where these may lead to rows being left out.

        Raises:
            DataError: A row is malformed; the same error on all ranks.
        """
        draws = self._pass_draws()
        leaves_out = self._config.overlong == "drop" or self._config.on_bad_row == "skip"
        tokens = tokens and (leaves_out or getattr(self._config, "unusable", "") == "drop")
        if draws is not None and (tokens or self.rows.is_filtered):
            self._kept = sum(
                self.rows.kept(first, min(first + _COUNTED_AT_ONCE, draws), tokens=tokens)
                for first in range(0, draws, _COUNTED_AT_ONCE)
            )

    def steps_per_epoch(self) -> int | None:
        """Return the batches of one epoch; None if unknown. Rows left out are part of it until they were counted.

        Windows of `packing: wrapped` depend on token counts, and a batch size that changes has no one answer.
        """
        rows = self._pass_draws() if self._kept is None else self._kept
        if rows is None or self._config.packing == "wrapped" or self._config.batch_size_schedule:
            return self._limits.batches
        batches = -(-rows // self._config.batch_size)
        return min(batches, self._limits.batches) if self._limits.batches else batches

    @property
    def epoch(self) -> float:
        """Passes done, with the part of the current one where its length is known."""
        draws, batches = self._shortest(draws_of(self._sizes)), self._limits.batches
        by_draws = (self.cursor.draw - self.cursor.epoch_first_draw) / draws if draws else 0.0
        by_batches = self.cursor.batches_in_epoch / batches if batches else 0.0
        return self.cursor.epoch + min(max(by_draws, by_batches), 1.0)

    def read_ahead(self, step: int, rows: int | None = None, batches: int = 1) -> T | None:
        """Return one of the next batches, all of which stay the next: `state()` is as before, and `next` returns them.

        An error in its rows shows before anything is written.

        Args:
            step: Of the batch, counted from 0.
            rows: How many rows each of the batches has; default: as configured.
            batches: Which one: 1 for the next.

        Raises:
            DataError: As `next`.
        """
        sizes = [rows or self._batch_size(step - batches + number) for number in range(1, batches + 1)]
        fitting = takewhile(lambda pair: pair[0].rows == pair[1], zip(self._ahead, sizes, strict=False))
        self._ahead = [batch for batch, _ in fitting]
        before = self.cursor, self._totals, self._sizes
        try:
            for size in sizes[len(self._ahead) :]:
                if self._ahead:
                    self.cursor, self._totals = self._ahead[-1].cursor, self._ahead[-1].totals
                batch = self._read(size)
                self._ahead.append(_BatchAhead(size, batch, self.cursor, self._totals, self._sizes))
        finally:
            self.cursor, self._totals, self._sizes = before
        return self._ahead[batches - 1].batch

    def next(self, step: int, rows: int | None = None) -> T | None:
        """Return the batch of a step (counted from 0), or None when the passes are done.

        Args:
            step: Which step.
            rows: How many rows it has; default: as configured.

        Raises:
            DataError: A row is malformed, or a whole pass holds nothing to train on; the same error on all ranks.
        """
        size = rows or self._batch_size(step)
        if self._ahead and self._ahead[0].rows == size:
            ahead = self._ahead.pop(0)
            self.cursor, self._totals, self._sizes = ahead.cursor, ahead.totals, ahead.sizes
            return ahead.batch
        self._ahead = []
        return self._read(size)

    def _read(self, size: int) -> T | None:
        try:
            return self._read_on(size)
        finally:
            self._sizes = tuple(self._order.sizes)

    def _read_on(self, size: int) -> T | None:
        while not self._is_done():
            candidates, cursor, ended = self._collect(size)
            self._refuse_too_little(candidates, cursor, size, ended=ended)
            most = self._pass_batches()
            limited = most is not None and cursor.batches_in_epoch >= most
            self.cursor = self._after_pass(cursor) if ended or limited else cursor
            if candidates.sequences:
                return self._batch_of(candidates)
        return None

    def _batch_size(self, step: int) -> int:
        schedule = self._config.batch_size_schedule
        starts = [start for start in schedule if start <= step]
        return schedule[max(starts)] if starts else self._config.batch_size

    def _pass_draws(self) -> int | None:
        """Return the draws of a whole pass; None while a stream's end is not known."""
        return self._shortest(self._order.epoch_draws)

    def _shortest(self, draws: int | None) -> int | None:
        return min((bound for bound in (draws, self._limits.draws) if bound is not None), default=None)

    def _left(self) -> float:
        """Return how many passes are left, the current one included."""
        return math.inf if self._limits.passes is None else self._limits.passes - self.cursor.epoch

    def _pass_end(self) -> int | None:
        """Return the draw at which the current pass ends; the last one may end early."""
        draws, remaining = self._pass_draws(), self._left()
        if draws is None:
            return None
        if remaining < 1 and self._pass_batches() is None:
            draws = min(draws, math.ceil(round(remaining * draws, 6)))
        return self.cursor.epoch_first_draw + draws

    def _pass_batches(self) -> int | None:
        """Return how many batches the current pass has at most; the last pass may have a part of them."""
        remaining, pass_steps = self._left(), self.steps_per_epoch()
        if remaining >= 1 or pass_steps is None or self._limits.by_rows:
            return self._limits.batches
        return math.ceil(round(remaining * pass_steps, 6))  # 0.3 * 10 is a little more than 3 in floating point

    def _is_done(self) -> bool:
        end, remaining, most = self._pass_end(), self._left(), self._pass_batches()
        if remaining >= 1:
            return False
        served = most is not None and self.cursor.batches_in_epoch >= most
        return remaining <= 0 or served or (end is not None and self.cursor.draw >= end)

    def _after_pass(self, cursor: Cursor) -> Cursor:
        """Return the cursor at the start of the next pass; after a part of a pass, nothing follows."""
        if self._left() < 1:
            return cursor
        epoch_draws = self._order.epoch_draws
        first = cursor.draw if epoch_draws is None else max(cursor.draw, cursor.epoch_first_draw + epoch_draws)
        if self._limits.repeat:
            return Cursor(cursor.epoch_first_draw, cursor.epoch + 1, cursor.epoch_first_draw, 0, 0, 0)
        # A window may have cut the row that the next pass begins with.
        offset = cursor.offset if first == cursor.draw else 0
        return Cursor(first, cursor.epoch + 1, first, 0, 0, offset)

    def _collect(self, size: int) -> tuple[Candidates[S], Cursor, bool]:
        """Take candidates in draw order, round by round, until the mini-batch is full or the pass ends."""
        wrapped = self._cut is not None
        goal = size * self._config.max_length if wrapped else size
        cursor, candidates = self.cursor, Candidates[S]()
        draw, filled, end = cursor.draw, 0, self._pass_end()
        while filled < goal and (end is None or draw < end):
            last = draw + (self._rows_for(goal - filled) if wrapped else goal - filled)
            before, tokens = draw, candidates.tokens
            draw = self.rows.round(draw, last if end is None else min(last, end), candidates)
            self._totals = (self._totals[0] + draw - before, self._totals[1] + candidates.tokens - tokens)
            filled = candidates.tokens - cursor.offset if wrapped else candidates.rows
            end = self._pass_end()  # known as soon as a stream's end is
        next_token, unused = NextToken(draw, 0), None
        if self._cut is not None:
            candidates, unused = self._cut(candidates, cursor.offset, goal)
            next_token = unused or next_token
        self._counts.update(candidates.counts)
        after = replace(
            cursor,
            draw=next_token.draw,
            offset=next_token.offset,
            batches_in_epoch=cursor.batches_in_epoch + 1,
            sequences_in_epoch=cursor.sequences_in_epoch + len(candidates.sequences),
        )
        return candidates, after, end is not None and draw >= end and unused is None

    def _rows_for(self, tokens: int) -> int:
        """Guess how many rows give so many tokens. Rows read too early are read again; the result does not change."""
        rows, tokens_read = self._totals
        return math.ceil(tokens * rows / tokens_read) if tokens_read else math.ceil(tokens / self._config.max_length)

    def _names(self) -> str:
        return ", ".join(source.name for source in self.rows.reader.sources)

    def _refuse_what_cannot_be(self) -> None:
        draws, passes = self._pass_draws(), self._limits.passes
        if draws is None and passes is not None and passes < 1 and self.steps_per_epoch() is None:
            raise DataError(
                f"epochs={passes:g} of {self._names()}: nobody knows the length of a stream before its end. "
                "Set steps, or epochs: 1."
            )
        largest = max([self._config.batch_size, *self._config.batch_size_schedule.values()])
        takes_little = self._config.allow_partial or self._config.packing == "wrapped"
        if draws is not None and draws < largest and not takes_little:
            raise DataError(self._too_small(f"has {draws} rows", f"{largest}"))

    def _refuse_too_little(self, candidates: Candidates[S], cursor: Cursor, size: int, *, ended: bool) -> None:
        """Refuse a whole pass without a sequence, or one that is smaller than a batch."""
        if not ended:
            return
        if cursor.sequences_in_epoch == 0:
            raise DataError(self._without_rows())
        if cursor.batches_in_epoch > 1 or self._left() < 1 or self._config.allow_partial:
            return
        window = self._config.max_length
        if self._config.packing == "wrapped" and candidates.tokens < size * window:
            raise DataError(self._too_small(f"gives {candidates.tokens} tokens", f"{size} windows of {window} tokens"))
        least = min(size, self._config.batch_size)  # a pass may hold fewer than someone asked for in excess
        if self._config.packing != "wrapped" and candidates.rows < least:
            raise DataError(self._too_few(candidates.rows, least))

    def _without_rows(self) -> str:
        counted = ", ".join(f"{name}: {number}" for name, number in sorted(self._counts.items()))
        bad = f"The first bad one: {self.rows.first_bad} " if self.rows.first_bad else ""
        return (
            f"No row of {self._names()} can be trained on (counted: {counted or 'no rows at all'}). {bad}"
            "Look at one with `holdfast data preview RUN.yaml`."
        )

    def _too_few(self, rows: int, least: int) -> str:
        if not (lost := lost_rows(self._counts, self._config.max_length)):
            return self._too_small(f"gives {rows} rows", f"{least}")
        few = f"Only {rows} rows of {self._names()} are left to train on, less than one batch of {least}: {lost}."
        look = "Look at all with `holdfast data check RUN.yaml`"
        return f"{few} {look}; raise data.max_length, or change what data.overlong does."

    def _too_small(self, has: str, batch: str) -> str:
        return (
            f"{self._names()} {has}, less than one batch of {batch}. Lower data.batch_size, add data, or set "
            "data.allow_partial: true."
        )


class SampleStream(BatchStream[Example, MiniBatch]):
    """Mini-batches to train on.

    Args:
        rows, config, limits: As in `BatchStream`.
        layout: How packs are built.

    Raises:
        DataError: As in `BatchStream`.
    """

    def __init__(
        self,
        rows: CandidateReader[Example],
        config: DataConfig,
        layout: Layout | None = None,
        limits: StreamLimits | None = None,
    ) -> None:
        super().__init__(rows, config, limits, self._windows if config.packing == "wrapped" else None)
        self._layout = layout or Layout()

    def _batch_of(self, candidates: Candidates[Example]) -> MiniBatch:
        return assemble(candidates, self.rows.ranks, self._config, self._layout)

    def _windows(
        self, candidates: Candidates[Example], offset: int, goal: int
    ) -> tuple[Candidates[Example], NextToken | None]:
        return cut_windows(candidates, self.rows.ranks, offset=offset, goal=goal, window=self._config.max_length)
