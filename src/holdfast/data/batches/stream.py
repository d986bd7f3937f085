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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeVar

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import BAD_ROWS, CandidateReader, Candidates, NextToken, cut_windows
from holdfast.data.batches.passes import Cursor, Pass, StreamLimits
from holdfast.data.content.counted import lost_rows
from holdfast.data.rows.reading import draws_of
from holdfast.data.rows.rows import Source
from holdfast.data.tokens.chat import S
from holdfast.errors import DataError
from holdfast.types import Example, MiniBatch, Prompt

T = TypeVar("T")

_COUNTED_AT_ONCE = 8192


Cut = Callable[[Candidates[S], int, int], tuple[Candidates[S], NextToken | None]]
"""Cuts candidates into windows of `goal` tokens together: function(found, tokens of its first row used, goal)."""


@dataclass(frozen=True)
class Place:
    """Where a stream stands behind a batch, and what was counted up to there."""

    cursor: Cursor
    seen: tuple[int, int]
    """Rows and tokens of all their sequences, read so far: how many tokens a row brings on average."""
    sizes: tuple[int | None, ...]
    """Rows of each source, as far as they were known."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What was counted since this start, such as rows left out."""
    rows_tokenised: int = 0
    """Rows this rank has turned into tokens since this start."""


@dataclass(frozen=True)
class _Read(Generic[T]):
    """A batch that was read and not handed out yet."""

    rows: int
    """How many it was read with."""
    batch: T | None
    after: Place
    """Where the stream stands after it."""


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
        self.rows: CandidateReader[S] = rows
        """Reads the rows; what it has read ahead is the stream's affair."""
        self._order = rows.reader.order
        self._config = config
        self._limits = limits or StreamLimits()
        self._cut: Cut[S] | None = cut
        self._kept: int | None = None
        """Rows of a pass that are trained on, where somebody counted."""
        self.place = Place(Cursor(0, 0, 0, 0, 0, 0), (0, 0), tuple(self._order.sizes))
        """Where the stream stands after the batch that was handed out last; reading ahead does not change it."""
        self._ahead: list[_Read[T]] = []
        """The next batches, as far as they were read early."""
        self.prepare: Callable[[T], T] = lambda batch: batch
        """Applied to each batch where it is read."""
        self._refuse_what_cannot_be()

    @abstractmethod
    def _batch_of(self, candidates: Candidates[S]) -> T:
        """Make a batch of its candidates."""

    @property
    def bad_rows(self) -> int:
        """Rows left out since this start because they cannot be read."""
        return self.place.counts.get(BAD_ROWS, 0)

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
        """Rows this rank has turned into tokens, for batches that were read ahead, too."""
        return self.rows.rows_tokenised

    def state(self) -> dict[str, Any]:
        """Return where the stream stands, as JSON-ready values."""
        place = self.place
        return {"cursor": asdict(place.cursor), "sizes": list(place.sizes), "seen": list(place.seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same data and seed stood, at any number of ranks."""
        self._ahead = []
        # Only streams: the size of other sources is what it is, and whether it may change is the caller's to judge.
        for index, source in enumerate(self.sources):
            if source.size is None:
                self._order.sizes[index] = state["sizes"][index]
        # How far windows look ahead decides when a stream's end is learned; hence what was seen is part of the state.
        rows, tokens = state["seen"]
        sizes = tuple(self._order.sizes)
        self.place = replace(self.place, cursor=Cursor(**state["cursor"]), seen=(rows, tokens), sizes=sizes)

    def count_rows(self, *, tokens: bool) -> None:
        """Count the rows of the first pass that are not left out, so that the number of its batches is exact.

        It asks the filter about every row. A stream whose end is not known is not counted.

        Args:
            tokens: Make tokens of the rows, too, where these may lead to rows being left out.

        Raises:
            DataError: A row is malformed; the same error on all ranks.
        """
        draws = self._limits.of_pass(self._order.epoch_draws)
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
        rows = self._limits.of_pass(self._order.epoch_draws) if self._kept is None else self._kept
        if rows is None or self._config.packing == "wrapped" or self._config.batch_size_schedule:
            return self._limits.batches
        batches = -(-rows // self._config.batch_size)
        return min(batches, self._limits.batches) if self._limits.batches else batches

    @property
    def epoch(self) -> float:
        """Passes done, with the part of the current one where its length is known."""
        return self._limits.done(self.place.cursor, draws_of(self.place.sizes))

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
        for number, (batch, size) in enumerate(zip(self._ahead, sizes, strict=False)):
            if batch.rows != size:
                del self._ahead[number:]
                break
        for size in sizes[len(self._ahead) :]:
            self._ahead.append(self._read(self._ahead[-1].after if self._ahead else self.place, size))
        return self._ahead[batches - 1].batch

    def next(self, step: int, rows: int | None = None) -> T | None:
        """Return the batch of a step (counted from 0), or None when the passes are done.

        Args:
            step: Which step.
            rows: How many rows it has; default: as configured.

        Raises:
            DataError: A row is malformed, or a whole pass holds nothing to train on; the same error on all ranks.
        """
        self.read_ahead(step, rows)
        read = self._ahead.pop(0)
        self.place = read.after
        return read.batch

    def _read(self, place: Place, size: int) -> _Read[T]:
        """Read the batch behind a place; batches without a sequence are passed over."""
        batch = None
        while batch is None and not self._pass(place.cursor).is_over(place.cursor):
            candidates, place = self._collect(place, size)
            present = self._pass(place.cursor)  # known anew: a stream's end may have been met
            self._refuse_too_little(candidates, place, size, present)
            place = replace(place, cursor=present.after(place.cursor))
            if candidates.sequences:
                batch = self.prepare(self._batch_of(candidates))
        return _Read(size, batch, replace(place, sizes=tuple(self._order.sizes)))

    def _batch_size(self, step: int) -> int:
        schedule = self._config.batch_size_schedule
        starts = [start for start in schedule if start <= step]
        return schedule[max(starts)] if starts else self._config.batch_size

    def _pass(self, cursor: Cursor) -> Pass:
        return self._limits.current(cursor, self._order.epoch_draws, self.steps_per_epoch())

    def _collect(self, place: Place, size: int) -> tuple[Candidates[S], Place]:
        """Take candidates in draw order, round by round, until the mini-batch is full or the pass ends."""
        wrapped = self._cut is not None
        goal = size * self._config.max_length if wrapped else size
        cursor, candidates, (rows, tokens) = place.cursor, Candidates[S](), place.seen
        draw, filled, end = cursor.draw, 0, self._pass(cursor).end
        while filled < goal and (end is None or draw < end):
            seen = rows + draw - cursor.draw, tokens + candidates.tokens
            last = draw + (self._rows_for(goal - filled, *seen) if wrapped else goal - filled)
            draw = self.rows.round(draw, last if end is None else min(last, end), candidates)
            filled = candidates.tokens - cursor.offset if wrapped else candidates.rows
            end = self._pass(cursor).end  # known as soon as a stream's end is
        seen = rows + draw - cursor.draw, tokens + candidates.tokens
        next_token = NextToken(draw, 0)
        if self._cut is not None:
            candidates, unused = self._cut(candidates, cursor.offset, goal)
            next_token = unused or next_token
        return candidates, replace(
            place,
            cursor=cursor.after_batch(next_token.draw, next_token.offset, len(candidates.sequences)),
            seen=seen,
            counts=candidates.counts + Counter(place.counts),
            rows_tokenised=self.rows.rows_tokenised,
        )

    def _rows_for(self, goal: int, rows: int, tokens: int) -> int:
        """Guess how many rows give so many tokens, from what rows gave so far.

        Rows read too early are read again; the result does not change.
        """
        return math.ceil(goal * rows / tokens) if tokens else math.ceil(goal / self._config.max_length)

    def _names(self) -> str:
        return ", ".join(source.name for source in self.rows.reader.sources)

    def _refuse_what_cannot_be(self) -> None:
        draws, passes = self._limits.of_pass(self._order.epoch_draws), self._limits.passes
        if draws is None and passes is not None and passes < 1 and self.steps_per_epoch() is None:
            raise DataError(
                f"epochs={passes:g} of {self._names()}: nobody knows the length of a stream before its end. "
                "Set steps, or epochs: 1."
            )
        largest = max([self._config.batch_size, *self._config.batch_size_schedule.values()])
        takes_little = self._config.allow_partial or self._config.packing == "wrapped"
        if draws is not None and draws < largest and not takes_little:
            raise DataError(self._too_small(f"has {draws} rows", f"{largest}"))

    def _refuse_too_little(self, candidates: Candidates[S], place: Place, size: int, present: Pass) -> None:
        """Refuse a whole pass without a sequence, or one that is smaller than a batch."""
        cursor = place.cursor
        if not present.has_ended(cursor):
            return
        if cursor.sequences_in_epoch == 0:
            raise DataError(self._without_rows(place.counts))
        if cursor.batches_in_epoch > 1 or present.share < 1 or self._config.allow_partial:
            return
        window = self._config.max_length
        if self._config.packing == "wrapped" and candidates.tokens < size * window:
            raise DataError(self._too_small(f"gives {candidates.tokens} tokens", f"{size} windows of {window} tokens"))
        least = min(size, self._config.batch_size)  # a pass may hold fewer than someone asked for in excess
        if self._config.packing != "wrapped" and candidates.rows < least:
            raise DataError(self._too_few(candidates.rows, least, place.counts))

    def _without_rows(self, counts: Mapping[str, int]) -> str:
        counted = ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))
        bad = f"The first bad one: {self.rows.first_bad} " if self.rows.first_bad else ""
        return (
            f"No row of {self._names()} can be trained on (counted: {counted or 'no rows at all'}). {bad}"
            "Look at one with `holdfast data preview RUN.yaml`."
        )

    def _too_few(self, rows: int, least: int, counts: Mapping[str, int]) -> str:
        if not (lost := lost_rows(counts, self._config.max_length)):
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


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a step."""

    own_prompts: tuple[Prompt, ...]
    """Those of this rank, in draw order."""
    ids: tuple[int, ...]
    """Prompt ids over all ranks, in draw order."""
    metrics: Mapping[str, float]
    """What reading counted, over all ranks."""


class PromptStream(BatchStream[Prompt, PromptBatch]):
    """Prompts, a step's at a time. A rank continues the prompts it read: none of them moves."""

    def _batch_of(self, candidates: Candidates[Prompt]) -> PromptBatch:
        own_prompts = tuple(prompt for _, prompt in sorted(candidates.own_sequences.items()))
        counted = {f"data/{name}": float(number) for name, number in candidates.counts.items()}
        return PromptBatch(own_prompts, tuple(sequence.draw for sequence in candidates.sequences), counted)
