"""Data that cannot fill a batch is refused, with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.data.rows.rows import from_rows
from holdfast.errors import DataError
from tests.batching.sources import indexed, numbered, streamed
from tests.batching.streams import stream

WRAPPED = {"packing": "wrapped", "max_length": 8, "tokens_per_micro_batch": 16, "batch_size": 4}


def test_a_set_that_trains_nothing_is_refused_with_what_was_counted() -> None:
    rows = [row | {"dropped": True} for row in numbered(8)]

    with pytest.raises(DataError) as raised:
        stream(from_rows(rows, "rows"), accept=lambda row: row["number"] < 6).next(0)

    assert str(raised.value) == (
        "No row of rows can be trained on (counted: filtered: 2, untrained: 6). Look at one with `holdfast data "
        "preview RUN.yaml`."
    )


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ("indexed", {"batch_size": 11}, "rows has 10 rows, less than one batch of 11."),
        ("indexed", {"batch_size_schedule": {50: 20}}, "rows has 10 rows, less than one batch of 20."),
        ("streamed", {"batch_size": 11}, "rows gives 10 rows, less than one batch of 11."),
        ("indexed", WRAPPED, "rows gives 30 tokens, less than one batch of 4 windows of 8 tokens."),
    ],
)
def test_a_set_smaller_than_one_batch_is_refused_unless_allowed(source: str, settings: Any, said: str) -> None:
    make = {"indexed": indexed, "streamed": streamed}[source]

    with pytest.raises(DataError) as raised:
        stream(make(10), **settings).next(0)
    assert stream(make(10), allow_partial=True, **settings).next(0) is not None

    assert str(raised.value) == f"{said} Lower data.batch_size, add data, or set data.allow_partial: true."


def test_a_set_that_becomes_too_small_by_a_filter_is_refused() -> None:
    with pytest.raises(DataError, match="rows gives 3 rows, less than one batch of 4"):
        stream(indexed(10), accept=lambda row: row["number"] < 3).next(0)


def test_a_stream_without_rows_is_refused() -> None:
    from holdfast.data.rows.reading import HeldOut

    nothing = HeldOut(streamed(2), 1e-6, keep=True)

    with pytest.raises(DataError, match=r"rows has no rows\."):
        stream(nothing).next(0)
