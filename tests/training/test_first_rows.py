"""The first rows of an evaluation set, shared out: each rank reads its own and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from holdfast.data.rows.rows import Row, Source, from_rows
from holdfast.data.tokens.chat import Tokenised
from holdfast.training.setup.rows import first_sequences
from holdfast.types import Example
from tests.batching.streams import Alone


class Rank(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Counted(list[dict[str, Any]]):
    """Rows that note which of them were asked for."""

    asked: list[int]

    def __getitem__(self, index: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), index]
        return super().__getitem__(index)


@dataclass
class Streamed:
    """Rows that can be walked and have no numbers."""

    rows: list[dict[str, Any]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def tokenise(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
    assert name == f"rows row {row['number']}"
    tokens = np.array([row["number"], 1])
    return Tokenised((Example(sample_id, sample_id, tokens, tokens < 0, source),), {})


def numbers(source: Source, rank: int, count: int | None = 8) -> list[int]:
    found = first_sequences(source, tokenise, count, Rank(rank, 3), lambda row: row["number"] != 4)
    assert [example.sample_id for example in found] == [int(example.tokens[0]) for example in found]
    return [example.sample_id for example in found]


@pytest.mark.parametrize("kind", [list, Streamed])
def test_ranks_share_the_first_rows_that_are_taken(kind: Any) -> None:
    source = from_rows(kind([{"number": number} for number in range(20)]), "rows")

    assert [numbers(source, rank) for rank in range(3)] == [[0, 3, 6], [1, 7], [2, 5]]
    assert len(numbers(source, 0, None)) == 7


def test_a_rank_reads_no_row_of_another() -> None:
    rows = Counted({"number": number} for number in range(20))
    source = from_rows(rows, "rows")
    rows.asked = []

    numbers(source, 1)

    assert rows.asked == [1, 4, 7]
