"""Read candidate rows, each on one rank, and tell every rank what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.data.chat import Tokenised
from holdfast.data.exchange import Exchange
from holdfast.data.reading import EndOfStream, RowReader
from holdfast.data.rows import Row
from holdfast.errors import DataError
from holdfast.types import Example

Tokenise = Callable[[Row, int, str, str], Tokenised]
"""(row, sample id, source name, the row's name for messages) -> its sequences"""


class Known(NamedTuple):
    """What every rank knows of one sequence."""

    draw: int
    part: int
    """Which sequence of its row."""
    tokens: int
    trained: int
    owner: int
    """The rank that holds it."""


@dataclass
class Candidates:
    """The accepted rows of one mini-batch: what this rank holds, and what all ranks know."""

    mine: dict[tuple[int, int], Example] = field(default_factory=dict)
    """(draw, part) -> sequence, for the rows this rank read"""
    known: list[Known] = field(default_factory=list)
    """All sequences in draw order, the same on every rank."""
    counts: Counter[str] = field(default_factory=Counter)
    rows: int = 0


class _Fact(NamedTuple):
    lengths: list[tuple[int, int]]
    """(tokens, trained tokens) of each sequence"""
    counts: dict[str, int]


class CandidateReader:
    """Rows by draw, shared out over the ranks.

    Args:
        reader: Rows by draw.
        tokenise: Rows to sequences.
        exchange: The ranks.
        accept: Row filter; None takes every row.
    """

    def __init__(
        self,
        reader: RowReader,
        tokenise: Tokenise,
        exchange: Exchange,
        accept: Callable[[Row], bool] | None = None,
    ) -> None:
        self.reader = reader
        self.rows_tokenised = 0
        self._tokenise = tokenise
        self._exchange = exchange
        self._accept = accept

    def round(self, first: int, last: int, found: Candidates) -> tuple[int, bool]:
        """Add draws first..last-1 to `found`; return the next draw, and whether a stream ended there.

        Raises:
            DataError: A row is malformed; the same error on all ranks.
        """
        facts: dict[int, _Fact | DataError | None] = {}
        for draw in range(first, last):
            if (draw - first) % self._exchange.size == self._exchange.rank:
                facts[draw] = self._read(draw, found)
            elif self.reader.has_streams and not self._advance(draw):
                facts[draw] = None
        merged: dict[int, tuple[int, _Fact | DataError | None]] = {}
        for rank, theirs in enumerate(self._exchange.gather(facts)):
            merged |= {draw: (rank, fact) for draw, fact in theirs.items()}
        for draw in range(first, last):
            owner, fact = merged[draw]
            if fact is None:
                return draw, True
            if isinstance(fact, DataError):
                raise fact
            found.counts.update(fact.counts)
            found.rows += bool(fact.lengths)
            found.known.extend(
                Known(draw, part, tokens, trained, owner) for part, (tokens, trained) in enumerate(fact.lengths)
            )
        return last, False

    def _advance(self, draw: int) -> bool:
        # Every rank walks a stream row by row, or the next block would start at different places.
        try:
            self.reader.read(draw)
        except EndOfStream:
            return False
        return True

    def _read(self, draw: int, found: Candidates) -> _Fact | DataError | None:
        try:
            source, name, row = self.reader.read(draw)
            if self._accept is not None and not self._accept(row):
                return _Fact([], {"filtered": 1})
            self.rows_tokenised += 1
            sequences = self._tokenise(row, draw, source.name, name)
        except EndOfStream:
            return None
        except DataError as error:
            return error
        found.mine |= {(draw, part): example for part, example in enumerate(sequences.examples)}
        lengths = [(example.tokens.size, example.trained_tokens) for example in sequences.examples]
        return _Fact(lengths, dict(sequences.counts))
