"""Rows in memory with and without an index, and exchanges between threads: what streams are made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from holdfast.data.rows.rows import Row, Source, from_rows
from holdfast.data.tokens.chat import Tokenised
from holdfast.types import Example


class Forward:
    """Rows that can be read front to back only, and how often they were opened and read."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self.read = 0
        self.opened = 0

    def __iter__(self) -> Iterator[Row]:
        self.opened += 1
        for row in self._rows:
            self.read += 1
            yield row


def numbered(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Return rows that carry their number."""
    return [{"number": first + index} for index in range(count)]


def indexed(count: int, name: str = "rows") -> Source:
    """Return numbered rows as a source with an index."""
    return from_rows(numbered(count), name)


def streamed(count: int, name: str = "rows") -> Source:
    """Return numbered rows as a stream."""
    return from_rows(Forward(numbered(count)), name)


def as_tokens(row: Row, sample_id: int, source: str, name: str) -> Tokenised:
    """Write a row as 1 + number % 5 tokens that hold its number; every one but the first is trained.

    A row may say how many tokens it has, or that it gives none.
    """
    number = int(row["number"])
    length = int(row.get("tokens", 1 + number % 5))
    if row.get("dropped") or length == 0:
        return Tokenised((), {"untrained": 1})
    mask = np.ones(length, dtype=np.bool_)
    mask[0] = False
    tokens = 1000 * number + np.arange(length)
    return Tokenised((Example(sample_id, sample_id, tokens, mask, source),), {})


class ThreadExchange:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, board: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's item, by rank."""
        self._board[self.rank] = item
        self._barrier.wait()
        items = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait()
        return items

    def swap(self, outgoing: Sequence[Any]) -> list[Any]:
        """Return what every rank sent here, by rank."""
        return [sent[self.rank] for sent in self.gather(list(outgoing))]


def on_threads(size: int, work: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Run the same work on `size` ranks and return what each gave, by rank; raise the first error."""
    board: dict[int, Any] = {}
    barrier = threading.Barrier(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadExchange(rank, size, board, barrier))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: it is raised below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
