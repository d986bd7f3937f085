"""Windows of equal length out of documents of any."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.batches.candidates import Candidates, NextToken, SequenceInfo, cut_windows, pieces_of
from tests.batching.examples import example
from tests.batching.streams import Alone


def documents(lengths: list[int], *, parts: list[int] | None = None) -> list[SequenceInfo]:
    """Return documents of these lengths; `parts` says how many belong to each row."""
    rows = np.repeat(np.arange(len(parts)), parts).tolist() if parts else list(range(len(lengths)))
    return [
        SequenceInfo(row, index, length, length - 1, 0)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def cut(lengths: list[int], **how: int) -> list[tuple[int, int, int]]:
    return [(piece.document.index_in_row, piece.start, piece.end) for piece in pieces_of(documents(lengths), **how)[0]]


def test_documents_are_cut_where_windows_end() -> None:
    pieces, rest = pieces_of(documents([7, 2, 6]), offset=0, goal=12, window=4)

    assert [(piece.document.index_in_row, piece.start, piece.end) for piece in pieces] == [
        (0, 0, 4), (0, 4, 7), (1, 0, 1), (1, 1, 2), (2, 0, 3),
    ]  # fmt: skip
    assert rest == NextToken(2, 3)


def test_what_was_used_before_is_left_out() -> None:
    assert cut([7, 2, 6], offset=5, goal=4, window=4) == [(0, 5, 7), (1, 0, 2)]


def test_nothing_is_left_when_documents_end_with_the_goal_or_before() -> None:
    assert pieces_of(documents([4, 4]), offset=0, goal=8, window=4)[1] is None
    assert pieces_of(documents([4, 1]), offset=0, goal=8, window=4)[1] is None
    assert pieces_of([], offset=0, goal=8, window=4) == ([], None)


def test_several_documents_of_one_row_count_as_one_place() -> None:
    pieces, rest = pieces_of(documents([3, 4, 5], parts=[2, 1]), offset=0, goal=5, window=5)

    assert [(piece.document.index_in_row, piece.start, piece.end) for piece in pieces] == [(0, 0, 3), (1, 0, 2)]
    assert rest == NextToken(0, 5)
    resumed = pieces_of(documents([3, 4, 5], parts=[2, 1]), offset=5, goal=5, window=5)
    assert [(piece.document.index_in_row, piece.start, piece.end) for piece in resumed[0]] == [(1, 2, 4), (2, 0, 3)]
    assert resumed[1] == NextToken(1, 3)


ROWS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=12)


@given(ROWS, st.integers(1, 9), st.integers(1, 3))
def test_windows_are_full_and_every_token_is_used_once_however_often_one_stops(
    rows: list[list[int]], window: int, windows_per_batch: int
) -> None:
    lengths, parts = [length for row in rows for length in row], [len(row) for row in rows]
    everything = documents(lengths, parts=parts)
    used: dict[int, list[int]] = {part: [] for part in range(len(lengths))}
    sizes: list[int] = []

    rest: NextToken | None = NextToken(0, 0)
    while rest is not None:
        left = [document for document in everything if document.draw >= rest.draw]
        pieces, rest = pieces_of(left, offset=rest.offset, goal=window * windows_per_batch, window=window)
        for piece in pieces:
            used[piece.document.index_in_row] += range(piece.start, piece.end)
            sizes.append(piece.end - piece.start)

    assert used == {part: list(range(length)) for part, length in enumerate(lengths)}
    edges = set(np.cumsum(sizes).tolist()) | {0}
    assert set(range(0, sum(lengths), window)) <= edges


def test_a_piece_keeps_its_tokens_and_loses_the_loss_of_its_first() -> None:
    whole = example(3, [False, True, True, False, True], per_token={"values": np.arange(5)})
    found = Candidates(
        own_sequences={(0, 0): whole}, sequences=[SequenceInfo(0, 0, 5, 3, 0)], counted=[(0, {"seen": 1})]
    )

    cut, rest = cut_windows(found, Alone(), offset=0, goal=5, window=2)

    pieces = [cut.own_sequences[(0, number)] for number in range(3)]
    assert [piece.tokens.tolist() for piece in pieces] == [[300, 301], [302, 303], [304]]
    assert [piece.loss_mask.tolist() for piece in pieces] == [[False, True], [False, False], [False]]
    assert [piece.per_token["values"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert [piece.trained for piece in cut.sequences] == [1, 0, 0]
    assert whole.loss_mask.tolist() == [False, True, True, False, True]
    assert rest is None


def test_what_was_counted_on_a_row_counts_where_the_row_begins() -> None:
    def found() -> Candidates:
        known = [SequenceInfo(draw, 0, 6, 5, 0) for draw in (3, 5, 6)]
        mine = {(draw, 0): example(draw, [False] + [True] * 5) for draw in (3, 5, 6)}
        return Candidates(mine, known, [(3, {"a": 1}), (4, {"filtered": 1}), (5, {"b": 1}), (6, {"c": 1})])

    first, rest = cut_windows(found(), Alone(), offset=0, goal=8, window=4)
    read_ahead, _ = cut_windows(found(), Alone(), offset=0, goal=6, window=3)
    continued, _ = cut_windows(found(), Alone(), offset=2, goal=99, window=4)

    assert rest == NextToken(5, 2)
    assert first.counts == {"a": 1, "filtered": 1, "b": 1}
    assert read_ahead.counts == {"a": 1, "filtered": 1}
    assert continued.counts == {"filtered": 1, "b": 1, "c": 1}
