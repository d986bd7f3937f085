"""A stream goes on from its state, and reading ahead is no state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.batches.passes import StreamLimits
from holdfast.data.rows.rows import from_rows
from holdfast.data.tokens.chat import Tokenised
from holdfast.errors import DataError
from tests.batching.sources import as_tokens, indexed, numbered, streamed
from tests.batching.streams import held, serve, stream

WRAPPED = {"packing": "wrapped", "max_length": 8, "tokens_per_micro_batch": 16, "batch_size": 3}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "schedule": {"shuffle": True, "batch_size_schedule": {3: 7, 8: 2}},
    "wrapped": {"shuffle": True, **WRAPPED},
    "blocks": {"shuffle": True, "shuffle_buffer": 7},
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.booleans(), st.booleans(), st.integers(0, 14), st.integers(0, 5))
def test_a_stream_goes_on_from_its_state_as_if_nothing_had_happened(
    kind: str, streams: bool, mixed: bool, step: int, seed: int
) -> None:
    def fresh() -> Any:
        first = streamed(31, "a") if streams else indexed(31, "a")
        more = [indexed(12, "b")] if mixed else []
        return stream(first, *more, weights=[3.0, 1.0] if mixed else None, seed=seed, **KINDS[kind])

    straight = fresh()
    for number in range(step):
        straight.next(number)
    state = json.loads(json.dumps(straight.state()))
    expected = [held(straight.next(number)) for number in range(step, step + 6)]

    resumed = fresh()
    resumed.load_state(state)

    assert [held(resumed.next(number)) for number in range(step, step + 6)] == expected
    assert resumed.state() == straight.state()
    assert resumed.epoch == straight.epoch


def test_reading_ahead_changes_nothing_but_the_time_of_an_error() -> None:
    straight, ahead = (stream(indexed(30), shuffle=True) for _ in range(2))

    ahead.read_ahead(0)
    state = ahead.state()

    assert state == straight.state()
    assert serve(ahead, 5) == serve(straight, 5)
    assert ahead.state() == straight.state()
    ahead.load_state(state)
    assert serve(ahead, 1) == serve(stream(indexed(30), shuffle=True), 1)

    ahead.load_state(state)
    ahead.read_ahead(0)
    more, expected = ahead.next(0, 7), stream(indexed(30), shuffle=True).next(0, 7)
    assert held(more) == held(expected), "more rows than were read early"

    bad = from_rows([{"number": 0}, {"number": "x"}, *numbered(8)], "rows")

    def refuse(row: Any, sample_id: int, source: str, name: str) -> Tokenised:
        if not isinstance(row["number"], int):
            raise DataError(f"{name} has no number.")
        return as_tokens(row, sample_id, source, name)

    with pytest.raises(DataError, match=r"rows row 1 has no number\."):
        stream(bad, tokenise=refuse).read_ahead(0)


@pytest.mark.parametrize("kind", KINDS)
def test_several_batches_that_are_read_ahead_are_the_next_ones(kind: str) -> None:
    straight, ahead = (stream(indexed(31), seed=3, **KINDS[kind]) for _ in range(2))

    for number in range(12):
        state = ahead.state()
        peeked = [held(ahead.read_ahead(number + further, None, further + 1)) for further in (2, 0, 1)]
        assert ahead.state() == state
        following = stream(indexed(31), seed=3, **KINDS[kind])
        following.load_state(json.loads(json.dumps(state)))
        expected = [held(following.next(number + further)) for further in range(3)]

        assert peeked == [expected[2], expected[0], expected[1]]
        assert held(ahead.next(number)) == held(straight.next(number))
        assert ahead.state() == straight.state()


def test_batches_that_were_read_ahead_with_other_rows_are_read_again() -> None:
    ahead, straight = (stream(indexed(60), shuffle=True) for _ in range(2))
    ahead.read_ahead(2, 3, 3)

    found = [held(ahead.next(0, 3)), held(ahead.next(1, 5)), held(ahead.next(2, 3))]

    assert found == [held(straight.next(step, rows)) for step, rows in enumerate((3, 5, 3))]
    assert ahead.state() == straight.state()


def test_behind_the_last_batch_nothing_is_read_ahead() -> None:
    ahead = stream(indexed(7), limits=StreamLimits(passes=1), batch_size=3, allow_partial=True)

    found = [ahead.read_ahead(number, None, number + 1) for number in range(5)]

    assert [batch is None for batch in found] == [False, False, False, True, True]
    assert len(serve(ahead, 5)) == 3
