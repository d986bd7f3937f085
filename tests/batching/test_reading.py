"""Rows by draw: the validation split, streams in shuffled blocks, and what a message calls a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.rows.reading import DrawOrder, EndOfStream, HeldOut, RowReader
from holdfast.data.rows.rows import Source, from_rows
from holdfast.errors import DataError
from tests.batching.sources import Forward, indexed, numbered, streamed


def numbers(source: Source) -> list[int]:
    return [row["number"] for row in source.scan(0)]


@given(st.integers(60, 400), st.floats(0.2, 0.8))
def test_the_split_and_the_rest_are_all_rows_in_order(count: int, share: float) -> None:
    source = indexed(count)
    kept, rest = HeldOut(source, share, keep=True), HeldOut(source, share, keep=False)

    assert sorted(numbers(kept) + numbers(rest)) == list(range(count))
    for part in (kept, rest):
        assert numbers(part) == sorted(numbers(part))
        assert [part.row(index)["number"] for index in range(part.size or 0)] == numbers(part)


def test_the_split_has_about_its_share() -> None:
    kept = HeldOut(indexed(20_000), 0.1, keep=True)

    assert kept.size is not None
    assert 1860 < kept.size < 2140  # 2000 expected; 3.3 standard deviations


def test_appended_rows_move_nothing_between_the_splits() -> None:
    short, long = (numbers(HeldOut(indexed(count), 0.2, keep=True)) for count in (300, 500))

    assert long[: len(short)] == short
    assert min(long[len(short) :]) >= 300


@pytest.mark.parametrize("keep", [False, True])
def test_a_stream_has_the_same_split(keep: bool) -> None:
    with_index, without = (HeldOut(source, 0.3, keep=keep) for source in (indexed(500), streamed(500)))

    assert numbers(without) == numbers(with_index)
    assert without.size is None
    assert [row["number"] for row in without.scan(40)] == numbers(with_index)[40:]


def test_the_start_of_a_scan_is_found_without_reading_rows() -> None:
    rows = Forward(numbered(1000))
    part = HeldOut(from_rows(rows, "rows"), 0.5, keep=True)
    expected = [number for number in numbers(HeldOut(indexed(1000), 0.5, keep=True)) if number > 700]

    found = next(part.scan(len(numbers(HeldOut(indexed(1000), 0.5, keep=True))) - len(expected)))

    assert found["number"] == expected[0]


@pytest.mark.parametrize(("keep", "left"), [(True, "the validation split"), (False, "training")])
def test_a_split_that_leaves_nothing_is_refused(keep: bool, left: str) -> None:
    share = 0.001 if keep else 0.999

    with pytest.raises(DataError) as raised:
        HeldOut(indexed(5), share, keep=keep)

    assert str(raised.value) == (
        f"data.validation_split={share} of the 5 rows of rows leaves none for {left}. Choose another share, or name an "
        "evaluation set under evaluation.sets."
    )


def read_all(reader: RowReader, count: int) -> list[int]:
    return [reader.read(draw).row["number"] for draw in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_row_is_called_by_its_number_in_the_file(shuffle: bool) -> None:
    """Found again by whoever reads the message, whatever order and split lie between."""
    sources: list[Source] = [
        indexed(50), streamed(50), HeldOut(indexed(50), 0.3, keep=False), HeldOut(streamed(50), 0.3, keep=False),
    ]  # fmt: skip
    for source in sources:
        reader = RowReader([source], DrawOrder([source.size], seed=1, shuffle=shuffle, block=8))
        for draw in range(30):
            found = reader.read(draw)
            assert found.name == f"rows row {found.row['number']}"


def test_a_stream_is_shuffled_block_by_block() -> None:
    reader = RowReader([streamed(25)], DrawOrder([None], seed=2, block=10))

    found = read_all(reader, 25)

    for start in (0, 10, 20):
        assert sorted(found[start : start + 10]) == list(range(start, min(start + 10, 25)))
    assert found != sorted(found)


def test_a_position_in_a_stream_needs_nothing_that_came_before() -> None:
    straight = read_all(RowReader([streamed(95)], DrawOrder([None], seed=2, block=10)), 95)

    for draw in (94, 10, 9, 57, 0):
        fresh = RowReader([streamed(95)], DrawOrder([None], seed=2, block=10))
        assert fresh.read(draw).row["number"] == straight[draw]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_is_read_once_when_read_in_order_even_with_gaps(shuffle: bool) -> None:
    rows = Forward(numbered(100))
    source = from_rows(rows, "rows")
    rows.opened = rows.read = 0
    reader = RowReader([source], DrawOrder([None], seed=2, block=4, shuffle=shuffle))

    for draw in range(1, 100, 9):  # as a rank of nine does
        reader.read(draw)

    assert rows.opened == 1
    assert rows.read <= 100


def test_without_a_shuffle_the_first_row_of_a_stream_needs_no_block() -> None:
    rows = Forward(numbered(100))
    source = from_rows(rows, "rows")
    rows.read = 0

    RowReader([source], DrawOrder([None], block=50, shuffle=False)).read(0)

    assert rows.read == 1


def test_the_end_of_a_stream_is_told_once_and_then_it_starts_again() -> None:
    reader = RowReader([streamed(7)], DrawOrder([None], seed=2, block=3))
    read_all(reader, 7)

    with pytest.raises(EndOfStream) as end:
        reader.read(7)
    reader.learn_size(end.value.source, end.value.size)

    assert end.value.size == 7
    assert sorted(reader.read(draw).row["number"] for draw in range(7, 14)) == list(range(7))
    assert [reader.read(draw).row["number"] for draw in range(14, 21)] != read_all(reader, 7)


def test_a_stream_that_shrinks_between_passes_is_found_out() -> None:
    rows = Forward(numbered(7))
    reader = RowReader([from_rows(rows, "rows")], DrawOrder([None], shuffle=False))
    reader.learn_size(0, 7)
    rows._rows.pop()

    with pytest.raises(
        DataError, match=r"rows had 7 rows in its first pass and has fewer now\. A file must not change"
    ):
        reader.read(13)
