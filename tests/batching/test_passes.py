"""How often a stream passes over its rows, and how far it says it is."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.batches.candidates import Ranks
from holdfast.data.batches.passes import StreamLimits
from holdfast.data.rows.rows import from_rows
from holdfast.errors import DataError
from tests.batching.sources import indexed, numbered, on_threads, streamed
from tests.batching.streams import Alone, serve, stream


@pytest.mark.parametrize(("passes", "rows"), [(1, 10), (2.0, 20), (0.5, 8), (1.5, 18), (0.01, 4), (0.7, 10), (1.1, 14)])
def test_parts_of_a_pass_are_whole_batches(passes: float, rows: int) -> None:
    """Of three batches to a pass: half is two, 1.1 passes are four."""
    sources = [indexed(10)] if passes < 1 else [indexed(10), streamed(10)]

    for source in sources:
        served = list(chain(*serve(stream(source, limits=StreamLimits(passes=passes)), 99)))
        assert served == (list(range(10)) * 2)[:rows]


def test_a_part_of_a_pass_is_not_rounded_up_by_floating_point() -> None:
    """1.1 - 1 is a little more than a tenth, and a tenth of ten batches is one batch."""
    found = stream(indexed(40), limits=StreamLimits(passes=1.1))

    assert len(serve(found, 99)) == 11


def test_the_epoch_of_a_run_that_ends_in_a_pass_is_a_part() -> None:
    found = stream(indexed(10), limits=StreamLimits(passes=1.5))

    serve(found, 99)

    assert found.epoch == 1.8


def test_a_part_of_a_pass_is_full_batches_of_the_rows_that_a_filter_leaves() -> None:
    found = stream(indexed(12), limits=StreamLimits(passes=1.1), accept=lambda row: row["number"] in {1, 5, 6, 8, 11})

    assert serve(found, 99) == [[1, 5, 6, 8], [11], [1, 5, 6, 8]]


@given(st.integers(4, 40), st.integers(1, 4), st.floats(0.05, 3.0))
def test_a_run_of_some_epochs_has_as_many_steps_as_were_planned(rows: int, batch: int, epochs: float) -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig, planned_steps

    found = stream(indexed(rows), batch_size=batch, limits=StreamLimits(passes=epochs))
    tree = {"epochs": epochs, "model": {"path": "m"}, "data": {"path": "d"}}

    assert len(serve(found, 999)) == planned_steps(from_mapping(tree, SFTConfig), found.steps_per_epoch())


def test_a_part_of_a_stream_is_refused_while_its_length_is_unknown() -> None:
    with pytest.raises(DataError) as raised:
        stream(streamed(10), limits=StreamLimits(passes=0.5))

    assert str(raised.value) == (
        "epochs=0.5 of rows: nobody knows the length of a stream before its end. Set steps, or epochs: 1."
    )


def test_a_filter_does_not_make_an_epoch_longer() -> None:
    """Planned steps count rows that are filtered out later; the stream itself knows when the epoch is over."""
    found = stream(indexed(16), accept=lambda row: row["number"] % 2 == 0, limits=StreamLimits(passes=1))

    assert found.steps_per_epoch() == 4
    assert serve(found, 99) == [[0, 2, 4, 6], [8, 10, 12, 14]]


@pytest.mark.parametrize(("passes", "batches"), [(1, 3), (2, 6), (0.5, 2), (1.5, 5)])
def test_rows_that_were_counted_make_the_planned_steps_exact(passes: float, batches: int) -> None:
    """Of 24 rows a filter takes ten, which are three batches; parts of a pass are parts of those."""
    found = stream(indexed(24), limits=StreamLimits(passes=passes), accept=lambda row: row["number"] > 13, shuffle=True)

    found.count_rows(tokens=False)

    assert found.steps_per_epoch() == 3
    assert len(serve(found, 99)) == batches


def test_rows_that_are_dropped_for_their_length_are_counted_by_their_tokens() -> None:
    """Of 20 rows every third gives nothing, so 13 are left: four batches, on one rank and on three."""
    rows = [row | {"dropped": row["number"] % 3 == 0} for row in numbered(20)]

    def steps(ranks: Ranks) -> tuple[int | None, int]:
        found = stream(from_rows(rows, "rows"), limits=StreamLimits(passes=1), overlong="drop", ranks=ranks)
        found.count_rows(tokens=True)
        return found.steps_per_epoch(), found.rows_tokenised

    assert steps(Alone()) == (4, 0)
    assert on_threads(3, steps) == [(4, 0)] * 3


def test_a_part_of_limited_batches_counts_batches_whatever_their_size() -> None:
    found = stream(indexed(99), limits=StreamLimits(passes=0.5, batches=10), batch_size_schedule={0: 8})

    assert [len(batch) for batch in serve(found, 99)] == [8] * 5


def test_the_epoch_counts_passes_and_the_part_of_the_current_one() -> None:
    found = stream(indexed(10))

    assert [found.epoch, *(found.next(step) and found.epoch for step in range(4))] == [0, 0.4, 0.8, 1.0, 1.4]


def test_the_epoch_of_a_stream_is_whole_until_its_length_is_known() -> None:
    found = stream(streamed(10))

    assert [found.next(step) and found.epoch for step in range(5)] == [0.0, 0.0, 1.0, 1.4, 1.8]


def test_limited_batches_are_the_whole_epoch() -> None:
    found = stream(indexed(40), limits=StreamLimits(batches=2, passes=2), shuffle=True)

    assert found.steps_per_epoch() == 2
    epochs = [found.next(step) and found.epoch for step in range(4)]
    assert epochs == [0.5, 1.0, 1.5, 2.0]
    assert found.next(4) is None


def test_limited_batches_of_a_shuffled_set_are_others_in_every_epoch() -> None:
    found = stream(indexed(40), limits=StreamLimits(batches=2), shuffle=True)

    first, second = serve(found, 2), serve(found, 2)

    order = stream(indexed(40), shuffle=True)
    assert first == serve(order, 2)
    serve(order, 8)
    assert second == serve(order, 2)


def test_limited_batches_of_a_stream_go_on_through_it() -> None:
    found = stream(streamed(10), limits=StreamLimits(batches=2, passes=2))

    assert serve(found, 9) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("streams", [False, True])
def test_overfitting_serves_the_same_batches_again_and_again(streams: bool) -> None:
    found = stream(
        streamed(40) if streams else indexed(40),
        limits=StreamLimits(batches=2, repeat=True),
        shuffle=True,
        shuffle_buffer=6,
    )

    batches = serve(found, 7)

    assert batches[2:] == [*batches[:2], *batches[:2], batches[0]]
    assert found.steps_per_epoch() == 2
    assert found.epoch == 3.5


def test_more_batches_to_overfit_than_there_are_is_the_whole_set() -> None:
    found = stream(indexed(6), limits=StreamLimits(batches=5, repeat=True))

    assert serve(found, 4) == [[0, 1, 2, 3], [4, 5]] * 2


@pytest.mark.parametrize("streams", [False, True])
def test_the_first_draws_of_a_pass_are_exactly_as_many_as_asked_for(streams: bool) -> None:
    found = stream(streamed(20) if streams else indexed(20), limits=StreamLimits(passes=1, draws=6))

    assert serve(found, 9) == [[0, 1, 2, 3], [4, 5]]
