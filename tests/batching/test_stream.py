"""What a stream serves: every row, in batches that are full."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import xxhash

from holdfast.data.batches.passes import StreamLimits
from holdfast.data.rows.rows import from_rows
from holdfast.data.tokens.chat import Tokenised
from tests.batching.sources import as_tokens, indexed, numbered
from tests.batching.streams import held, numbers, serve, stream


def test_rows_come_in_batches_and_the_last_partial_batch_runs() -> None:
    found = stream(indexed(10), limits=StreamLimits(passes=2))

    assert serve(found, 9) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    assert found.next(9) is None


def test_a_sample_is_known_by_its_draw() -> None:
    found = stream(indexed(6), batch_size=4, limits=StreamLimits(passes=2))

    assert [list(held(found.next(step))) for step in range(4)] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


def test_every_epoch_of_a_shuffled_set_holds_every_row_in_an_order_of_its_own() -> None:
    found = stream(indexed(10), shuffle=True)

    first, second = (list(chain(*serve(found, 3))) for _ in range(2))

    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_filter_skips_rows_counts_them_and_still_fills_batches() -> None:
    found = stream(indexed(20), accept=lambda row: row["number"] % 3 == 0, limits=StreamLimits(passes=1))

    first, second = found.next(0), found.next(1)

    assert numbers(first) == [0, 3, 6, 9]
    assert numbers(second) == [12, 15, 18]
    assert first is not None
    assert second is not None
    assert first.metrics["data/filtered"] == 6  # 1 2 4 5 7 8; row 9 is the fourth
    assert second.metrics["data/filtered"] == 7  # 10 11 13 14 16 17 19
    assert found.rows_tokenised == 7


def test_dropped_rows_are_replaced_by_the_next() -> None:
    rows = [row | {"dropped": row["number"] in {1, 2, 6}} for row in numbered(8)]

    found = stream(from_rows(rows, "rows"), limits=StreamLimits(passes=1))

    assert serve(found, 3) == [[0, 3, 4, 5], [7]]


def test_dropped_rows_at_the_end_make_no_batch_of_their_own() -> None:
    rows = [row | {"dropped": row["number"] >= 4} for row in numbered(8)]

    found = stream(from_rows(rows, "rows"), limits=StreamLimits(passes=2))

    assert serve(found, 9) == [[0, 1, 2, 3]] * 2


def test_metrics_by_hand() -> None:
    in_order = b"".join(struct.pack("<qq", draw, 0) for draw in range(4))  # each row is one sequence, its part 0
    batch = stream(indexed(4), tokens_per_micro_batch=16).next(0)

    assert batch is not None
    assert batch.samples == 4
    assert batch.tokens == 1 + 2 + 3 + 4
    assert batch.trained_tokens == 0 + 1 + 2 + 3
    assert batch.count == 6.0
    assert batch.metrics == {
        "data/rows": 4.0, "data/tokens": 10.0, "data/mean_length": 2.5, "data/fill": 10 / 16, "data/micro_batches": 1.0,
        "data/order_hash": float(xxhash.xxh3_64_intdigest(in_order) >> 12),
    }  # fmt: skip


def test_sequences_of_one_row_are_one_prompt() -> None:
    def in_halves(row: Any, sample_id: int, source: str, name: str) -> Tokenised:
        whole = as_tokens(row | {"tokens": 4}, sample_id, source, name)
        return Tokenised((whole.examples[0], *as_tokens(row | {"tokens": 3}, sample_id, source, name).examples), {})

    batch = stream(indexed(4), tokenise=in_halves, average="prompt_mean", tokens_per_micro_batch=99).next(0)

    assert batch is not None
    assert batch.samples == 8
    assert batch.count == pytest.approx(4.0)
    micro_batch = batch.micro_batches[0]
    assert Counter(micro_batch.prompt_ids) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert micro_batch.weights[micro_batch.loss_mask].tolist() == pytest.approx([1 / 5] * 20)


def test_a_batch_size_may_grow_with_the_steps() -> None:
    found = stream(indexed(100), batch_size=2, batch_size_schedule={2: 5, 4: 1})

    assert [len(batch) for batch in serve(found, 6)] == [2, 2, 5, 5, 1, 1]
