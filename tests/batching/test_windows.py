"""Windows of equal length over a pass, whatever the documents."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.data.batches.passes import StreamLimits
from holdfast.data.rows.rows import from_rows
from tests.batching.sources import Forward, numbered
from tests.batching.streams import Alone, held, stream

WRAPPED = {"packing": "wrapped", "max_length": 8, "tokens_per_micro_batch": 16, "batch_size": 3}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_windows_are_full_and_hold_every_token_once(streams: bool, tokens: int) -> None:
    rows = [row | {"tokens": tokens + row["number"] % 3} for row in numbered(60)]
    source = from_rows(Forward(rows) if streams else rows, "rows")
    found = stream(source, limits=StreamLimits(passes=1), **WRAPPED)

    batches = [found.next(step) for step in range(200)]
    served = [batch for batch in batches if batch is not None]

    total = sum(row["tokens"] for row in rows)
    assert [batch.tokens for batch in served] == [24] * (total // 24) + ([total % 24] if total % 24 else [])
    everything: dict[int, list[int]] = {}
    for batch in served:
        for sample, found_tokens in held(batch).items():
            everything.setdefault(sample, []).extend(found_tokens)
    assert everything == {row["number"]: [1000 * row["number"] + i for i in range(row["tokens"])] for row in rows}


class Counted(Alone):
    def __init__(self) -> None:
        self.gathered = 0

    def gather(self, item: Any) -> list[Any]:
        self.gathered += 1
        return super().gather(item)


@pytest.mark.parametrize("tokens", [1, 90])
def test_windows_are_cut_with_few_questions_and_little_read_twice(tokens: int) -> None:
    """Documents far shorter or longer than a window: how many rows fill a batch is learned from the first."""
    ranks = Counted()
    rows = [row | {"tokens": tokens + row["number"] % 2} for row in numbered(3000)]
    found = stream(from_rows(rows, "rows"), ranks=ranks, **(WRAPPED | {"batch_size": 32}))
    found.next(0)
    ranks.gathered = before = 0
    before = found.rows_tokenised

    served = [found.next(step) for step in range(1, 6)]

    used = len(set().union(*(held(batch) for batch in served)))
    assert found.rows_tokenised - before <= 1.1 * used + 2 * 5
    assert ranks.gathered <= 4 * 5


def test_rows_read_too_early_are_counted_once() -> None:
    rows = [row | {"tokens": 30} for row in numbered(40)]

    found = stream(
        from_rows(rows, "rows"), accept=lambda row: row["number"] % 2 == 0, limits=StreamLimits(passes=1), **WRAPPED
    )

    served = [found.next(step) for step in range(25)]
    assert sum(batch.metrics.get("data/filtered", 0) for batch in served if batch is not None) == 20
    assert found.next(25) is None


@pytest.mark.parametrize("streams", [False, True])
def test_a_pass_of_limited_batches_goes_on_in_the_row_that_the_one_before_cut(streams: bool) -> None:
    """A batch is 24 tokens and a row has ten: three batches, each a pass of its own, hold 72 tokens once."""
    rows = [row | {"tokens": 10} for row in numbered(40)]
    source = from_rows(Forward(rows) if streams else rows, "rows")
    found = stream(
        source, limits=StreamLimits(batches=1, passes=3) if streams else StreamLimits(batches=3, passes=1), **WRAPPED
    )

    served = [found.next(step) for step in range(3)]

    tokens = [token for batch in served for sample in held(batch).values() for token in sample]
    assert sorted(tokens) == [1000 * (place // 10) + place % 10 for place in range(72)]
