"""Which row comes next: permutations, proportions, and nothing but the seed and the number of the draw."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.rows.reading import DECK, DrawOrder, deck_counts


def rows(order: DrawOrder, first: int, last: int) -> list[tuple[int, int | None]]:
    return [(place.source, place.row) for place in (order.place(draw) for draw in range(first, last))]


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**40)


@settings(max_examples=15)
@given(SIZES, SEEDS, st.booleans(), st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_place_depends_on_seed_and_draw_only(sizes: list[int], seed: int, weighted: bool, asked: list[int]) -> None:
    weights = [float(1 + index) for index in range(len(sizes))] if weighted else None
    walked = [DrawOrder(sizes, weights, seed=seed).place(draw) for draw in range(201)]

    order = DrawOrder(sizes, weights, seed=seed)

    assert [order.place(draw) for draw in asked] == [walked[draw] for draw in asked]


@given(SIZES, SEEDS)
def test_every_epoch_holds_every_row_once(sizes: list[int], seed: int) -> None:
    order = DrawOrder(sizes, seed=seed)
    total = order.epoch_draws
    assert total is not None

    epochs = [rows(order, total * epoch, total * (epoch + 1)) for epoch in range(3)]

    everything = [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order, other = DrawOrder([50], seed=1), DrawOrder([50], seed=2)

    assert rows(order, 0, 50) != rows(order, 50, 100)
    assert rows(order, 0, 50) != rows(other, 0, 50)


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    """A run that resumes under another version of numpy must see these numbers."""
    order = DrawOrder([10, 5], seed=17)
    weighted = DrawOrder([10, 5], [3.0, 1.0], seed=17)

    assert rows(order, 0, 8) == [(1, 2), (0, 9), (1, 3), (0, 7), (0, 0), (0, 6), (1, 0), (1, 4)]
    assert rows(weighted, 0, 8) == [(0, 7), (0, 1), (1, 1), (1, 2), (0, 4), (0, 3), (0, 6), (1, 0)]
    assert DrawOrder([None], seed=17).within_block(0, 2, 3, 6).tolist() == [2, 4, 3, 1, 5, 0]


def test_all_shuffles_of_three_rows_are_equally_likely() -> None:
    found = Counter(tuple(row for _, row in rows(DrawOrder([3], seed=seed), 0, 3)) for seed in range(3000))

    assert len(found) == 6
    assert all(400 < count < 600 for count in found.values())  # 500 expected; 4.9 standard deviations


def test_without_a_shuffle_rows_come_as_they_stand() -> None:
    order = DrawOrder([3, 2], shuffle=False)

    assert rows(order, 0, 7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 0), (0, 1)]


def test_a_mixture_without_a_shuffle_is_spread_evenly() -> None:
    order = DrawOrder([100, 100], [3.0, 1.0], shuffle=False)

    assert rows(order, 0, 8) == [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4), (1, 1), (0, 5)]


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=12), SEEDS, st.integers(0, 2), st.booleans())
def test_a_deck_has_the_exact_proportions(weights: list[float], seed: int, deck: int, shuffle: bool) -> None:
    order = DrawOrder([7] * len(weights), weights, seed=seed, shuffle=shuffle)

    drawn = Counter(order.place(draw).source for draw in range(deck * DECK, (deck + 1) * DECK))

    counts = deck_counts(weights)
    assert [drawn[source] for source in range(len(weights))] == counts.tolist()
    assert counts.sum() == DECK
    assert counts.min() >= 1
    exact = np.asarray(weights) / sum(weights) * DECK
    fair = exact >= 1
    assert np.all(np.abs(counts - exact)[fair] <= len(weights))


def test_proportions_by_hand() -> None:
    assert deck_counts([3.0, 1.0]).tolist() == [3072, 1024]
    assert deck_counts([1.0, 1.0, 1.0]).tolist() == [1366, 1365, 1365]
    assert deck_counts([1e-9, 1e-9, 1e-9, 1.0]).tolist() == [1, 1, 1, 4093]


def test_each_source_of_a_mixture_is_passed_over_whole() -> None:
    order = DrawOrder([5, 300], [1.0, 1.0], seed=3)
    taken: dict[int, list[int | None]] = {0: [], 1: []}

    for draw in range(1200):
        place = order.place(draw)
        assert place.turn == len(taken[place.source])
        taken[place.source].append(place.row)

    for source, size in ((0, 5), (1, 300)):
        passes = [taken[source][start : start + size] for start in range(0, len(taken[source]) - size + 1, size)]
        assert len(passes) >= 1
        assert all(sorted(each) == list(range(size)) for each in passes)  # type: ignore[type-var]


def test_a_stream_is_passed_over_again_once_its_size_is_known() -> None:
    order = DrawOrder([None])
    assert order.epoch_draws is None
    assert order.pass_of(0, 12) == (0, 12)
    assert order.place(12).row is None

    order.sizes[0] = 5

    assert order.epoch_draws == 5
    assert order.pass_of(0, 12) == (2, 2)


def test_blocks_of_a_stream_are_permuted_by_pass_and_number() -> None:
    order = DrawOrder([None], seed=4)

    blocks = [order.within_block(0, epoch, block, 50).tolist() for epoch, block in ((0, 0), (0, 1), (1, 0))]

    assert all(sorted(block) == list(range(50)) for block in blocks)
    assert blocks[0] != blocks[1] != blocks[2] != blocks[0]


@pytest.mark.parametrize("epochs", [1, 30])
def test_memory_does_not_grow_with_epochs(epochs: int) -> None:
    order = DrawOrder([1000], seed=1)

    for epoch in range(epochs):
        order.place(1000 * epoch)

    kept = [values for of_source in order._permutations.values() for values in of_source.values()]
    assert sum(values.nbytes for values in kept) <= 2 * 4 * 1000
