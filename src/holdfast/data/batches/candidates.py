"""Read and tokenise candidate rows, each on one rank, and share their lengths with all ranks.

The collectives are passed in as `Ranks`, since this layer does not import torch.distributed. With `packing: wrapped`
the candidates are cut into windows of equal length; the remaining tokens start the next update.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from holdfast.config.sections.data import DataConfig, PromptDataConfig
from holdfast.data.content.lengths import joined_inputs
from holdfast.data.rows.reading import EndOfStream, RowReader
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import RowTokeniser, S, Tokenised
from holdfast.errors import DataError, UserError
from holdfast.types import Example, Prompt

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


BAD_ROWS = "bad_rows"
"""Rows that were left out since they cannot be read."""

Tokenise = Callable[[Row, int, str, str], Tokenised[S]]
"""(row, sample id, source name, the row's name for messages) -> its sequences"""


class SequenceInfo(NamedTuple):
    """Description of one sequence, the same on every rank."""

    draw: int
    index_in_row: int
    tokens: int
    trained: int
    owner: int
    """The rank that holds it."""
    head: int = 0
    """Its first tokens that all sequences of its draw have in common, and none of which is trained."""
    has_inputs: bool = False
    """Whether it brings inputs only the model understands."""


@dataclass
class Candidates(Generic[S]):
    """The candidate sequences of one mini-batch: those read by this rank, and facts about all of them."""

    own_sequences: dict[tuple[int, int], S] = field(default_factory=dict)
    """(draw, index in its row) -> sequence, for the rows this rank read"""
    sequences: list[SequenceInfo] = field(default_factory=list)
    """All sequences in draw order, the same on every rank."""
    counted: list[tuple[int, Mapping[str, int]]] = field(default_factory=list)
    """(draw, counts) of the rows for which something was counted, such as truncations."""

    @property
    def rows(self) -> int:
        """Rows that gave a sequence."""
        return len({sequence.draw for sequence in self.sequences})

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)

    @property
    def counts(self) -> Counter[str]:
        """What was counted, over all rows."""
        total: Counter[str] = Counter()
        for _, counts in self.counted:
            total.update(counts)
        return total


class _RowSummary(NamedTuple):
    lengths: list[tuple[int, int, bool]]
    """(tokens, trained tokens, whether it brings model inputs) of each sequence"""
    counts: Mapping[str, int]
    head: int = 0
    bad: str = ""
    """What is wrong with the row, where bad rows are left out."""


_Outcome = _RowSummary | UserError | EndOfStream


class CandidateReader(Generic[S]):
    """Reads and tokenises rows by draw, distributed over the ranks.

    Args:
        reader: Reads rows by draw.
        tokenise: Turns a row into sequences.
        ranks: The ranks.
        accept: Row filter; None accepts every row.
        skip: Called on every rank with the mistake of a bad row, which is then skipped; None: a bad row is an error.
    """

    def __init__(
        self,
        reader: RowReader,
        tokenise: Tokenise[S],
        ranks: Ranks,
        accept: Callable[[Row], bool] | None = None,
        skip: Callable[[str], None] | None = None,
    ) -> None:
        self.reader = reader
        self.rows_tokenised = 0
        """Rows that this rank has tokenised."""
        self._tokenise: Tokenise[S] = tokenise
        self.ranks = ranks
        self._accept = accept
        self._skip = skip
        self.first_bad = ""
        """What was wrong with the first bad row."""
        self.reads = ""
        """What this rank reads at the moment, for messages."""
        self.notes: list[str] = []
        """What reading has to tell the user."""

    def round(self, first: int, last: int, candidates: Candidates[S]) -> int:
        """Add draws first..last-1 to `candidates`, and return the draw after them.

        Where a draw meets the end of a stream, all ranks note the stream's size and the round ends before that draw:
        with the size known, it leads to another row. E.g. draw 20 of a stream of 20 rows is the first of the next pass.

        Raises:
            UserError: A row is malformed; the same error on all ranks.
        """
        size, rank = self.ranks.size, self.ranks.rank
        outcomes: dict[int, _Outcome] = {draw: self._read(draw, candidates) for draw in range(first + rank, last, size)}
        self.reads = ""
        everyone = self.ranks.gather(outcomes)
        for draw in range(first, last):
            owner = (draw - first) % size
            match everyone[owner][draw]:
                case EndOfStream() as end:
                    self.reader.learn_size(end.source, end.size)
                    return draw
                case UserError() as error:
                    raise error
                case _RowSummary(lengths, counts, head, bad):
                    if bad and self._skip is not None:
                        self.first_bad = self.first_bad or bad
                        self._skip(bad)
                    if counts:
                        candidates.counted.append((draw, counts))
                    candidates.sequences.extend(
                        SequenceInfo(draw, index, tokens, trained, owner, head, has_inputs)
                        for index, (tokens, trained, has_inputs) in enumerate(lengths)
                    )
        return last

    @property
    def is_filtered(self) -> bool:
        """Whether some rows are not taken."""
        return self._accept is not None

    def kept(self, first: int, last: int, *, tokens: bool) -> int:
        """Count the draws first..last-1 that are not left out; all ranks call this together.

        Args:
            first, last: Which draws.
            tokens: Count those that give a sequence; off: those that the filter takes.

        Raises:
            UserError: A row is malformed; the same error on all ranks.
        """
        if tokens:
            candidates, tokenised = Candidates[S](), self.rows_tokenised
            self.round(first, last, candidates)
            self.rows_tokenised = tokenised
            return candidates.rows
        draws = range(first + self.ranks.rank, last, self.ranks.size)
        try:
            own_count: int | UserError = sum(self._takes(draw) for draw in draws)
        except UserError as error:
            own_count = error
        total = 0
        for count in self.ranks.gather(own_count):
            if isinstance(count, UserError):
                raise count
            total += count
        return total

    def _takes(self, draw: int) -> bool:
        """Say whether a row can be read and the filter takes it."""
        try:
            row = self.reader.read(draw).row
        except DataError:
            if self._skip is None:
                raise
            return False
        return self._accept is None or self._accept(row)

    def _read(self, draw: int, candidates: Candidates[S]) -> _Outcome:
        left_out = () if self._skip is None else DataError
        try:
            self.reads = f"draw {draw}"
            try:
                source, name, row = self.reader.read(draw)
            except left_out as error:
                return _RowSummary([], {BAD_ROWS: 1}, bad=str(error))
            self.reads = name
            if self._accept is not None and not self._accept(row):
                return _RowSummary([], {"filtered": 1})
            self.rows_tokenised += 1
            try:
                with broken_text_named(row, name):
                    sequences = self._tokenise(row, draw, source.name, name)
            except left_out as error:
                return _RowSummary([], {BAD_ROWS: 1}, bad=str(error))
        except (EndOfStream, UserError) as outcome:
            return outcome
        candidates.own_sequences |= {(draw, index): example for index, example in enumerate(sequences.examples)}
        lengths = [
            (example.tokens.size, example.trained_tokens, bool(example.model_inputs)) for example in sequences.examples
        ]
        return _RowSummary(lengths, sequences.counts, sequences.head)


@contextmanager
def broken_text_named(row: Row, name: str) -> Iterator[None]:
    """Name the column of a row that is not valid text if tokenising the row fails in the block because of it.

    Raises:
        DataError: A column holds half of a UTF-16 pair.
    """
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        if (broken := _unwritable(row)) is None:
            raise
        raise DataError(
            f"{name}: column {broken!r} holds half of a UTF-16 pair (\\ud800 to \\udfff on its own), which is no "
            "text. Write the file anew with whole characters, or leave the row out by data.filter."
        ) from error


def _unwritable(row: Row) -> str | None:
    """Return the column that has no form in UTF-8, if one has none."""
    for column, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, default=lambda _: "").encode()
        except UnicodeEncodeError:
            return column
    return None


def prompt_tokeniser(
    tokeniser: RowTokeniser,
    decode: Callable[[list[int]], str],
    config: DataConfig,
    longest: int,
    why_no_videos: str = "",
) -> Tokenise[Prompt]:
    """Return the function that turns rows into prompts.

    Args:
        tokeniser: Renders and tokenises a row's prompt.
        decode: Tokens to text, special tokens included.
        config: The data section.
        longest: Tokens a prompt may have.
        why_no_videos: Why a prompt may have no videos; "" if it may.
    """

    def tokenise(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Prompt]:
        written, laid, positions, counts, images = tokeniser.opening(row, name, why_no_videos)
        tokens = np.asarray(laid.tokens, dtype=np.int64)
        if tokens.size == 0:
            raise DataError(f"{name}: its prompt is empty, and there is nothing to continue. Remove the row.")
        if tokens.size <= longest:
            inputs = joined_inputs(laid)
            prompt = Prompt(sample_id, tokens, decode(written), dict(row), source, inputs, positions, images)
            return Tokenised((prompt,), counts, lengths=(tokens.size,))
        if config.overlong == "refuse":
            limit, key = f"data.max_length={config.max_length} less rollout.max_new_tokens", "data.max_length"
            if isinstance(config, PromptDataConfig) and config.max_prompt_length is not None:
                limit = key = "data.max_prompt_length"
            raise DataError(
                f"{name}: its prompt has {tokens.size} tokens, and {limit} leaves room for {longest}. Raise {key}, or "
                "set data.overlong: drop."
            )
        return Tokenised((), {"overlong_dropped": 1}, lengths=(tokens.size,))

    return tokenise


@dataclass(frozen=True)
class NextToken:
    """The first token that no window has used."""

    draw: int
    offset: int
    """Tokens of that row used already."""


@dataclass(frozen=True)
class Piece:
    """Tokens start..end-1 of one document; it never crosses a window's edge."""

    document: SequenceInfo
    start: int
    end: int

    def of(self, example: Example) -> Example:
        """Return the piece as a sequence of its own; nothing predicts its first token any more."""
        loss_mask = example.loss_mask[self.start : self.end].copy()
        loss_mask[:1] = False
        per_token = {name: values[self.start : self.end] for name, values in example.per_token.items()}
        return replace(example, tokens=example.tokens[self.start : self.end], loss_mask=loss_mask, per_token=per_token)


def pieces_of(
    documents: Sequence[SequenceInfo], *, offset: int, goal: int, window: int
) -> tuple[list[Piece], NextToken | None]:
    """Cut documents into pieces that fill windows exactly.

    Args:
        documents: In draw order; those of one row follow each other.
        offset: Tokens of the first row used before.
        goal: Tokens to hand out; fewer when the documents end.
        window: Tokens of one window.

    Returns:
        The pieces, and where the unused rest begins (None if nothing is left).
    """
    pieces: list[Piece] = []
    used, row, before = 0, -1, 0  # `before`: tokens of this row in earlier documents
    for document in documents:
        if document.draw != row:
            row, before = document.draw, 0
        used_before = offset if row == documents[0].draw else 0
        start = min(max(used_before - before, 0), document.tokens)
        while start < document.tokens:
            if used == goal:
                return pieces, NextToken(row, before + start)
            end = min(document.tokens, start + window - used % window)
            pieces.append(Piece(document, start, end))
            used += end - start
            start = end
        before += document.tokens
    return pieces, None


def cut_windows(
    candidates: Candidates[Example], ranks: Ranks, *, offset: int, goal: int, window: int
) -> tuple[Candidates[Example], NextToken | None]:
    """Replace documents by the pieces of their windows; arguments as in `pieces_of`."""
    pieces, next_token = pieces_of(candidates.sequences, offset=offset, goal=goal, window=window)
    documents, held = [piece.document for piece in pieces], candidates.own_sequences
    own = {
        (document.draw, number): piece.of(held[document.draw, document.index_in_row])
        for number, (piece, document) in enumerate(zip(pieces, documents, strict=True))
        if document.owner == ranks.rank
    }
    trained: dict[tuple[int, int], int] = {}
    for theirs in ranks.gather({key: example.trained_tokens for key, example in own.items()}):
        trained |= theirs
    sequences = [
        SequenceInfo(document.draw, number, piece.end - piece.start, trained[document.draw, number], document.owner)
        for number, (piece, document) in enumerate(zip(pieces, documents, strict=True))
    ]
    counted = _counts_of_begun_rows(candidates, offset, next_token)
    return replace(candidates, own_sequences=own, sequences=sequences, counted=counted), next_token


def _counts_of_begun_rows(
    candidates: Candidates[Example], offset: int, next_token: NextToken | None
) -> list[tuple[int, Mapping[str, int]]]:
    """Return what was counted on rows whose first token is used here: rows read ahead or cut are counted once."""
    first = candidates.sequences[0].draw if candidates.sequences and offset > 0 else -1
    return [
        (draw, counts)
        for draw, counts in candidates.counted
        if draw != first and (next_token is None or (draw, 0) < (next_token.draw, next_token.offset))
    ]
