"""Which sequences share a forward pass, and on which rank."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.data.batches.assembly import best_fit_decreasing, plan_packs

LENGTHS = st.lists(st.integers(1, 100), max_size=60)
RANKS = st.integers(1, 5)


SHORT_AND_TIGHT = st.tuples(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 13))
LONG_AND_LOOSE = st.tuples(LENGTHS, st.integers(100, 300))


@settings(max_examples=300)
@given(SHORT_AND_TIGHT | LONG_AND_LOOSE, RANKS, st.booleans())
@example(([2, 3, 4, 5, 6], 10), 2, False)  # full to the last token: nothing may go into the emptier pack first
def test_every_unit_is_packed_once_within_the_budget_in_as_many_packs_on_every_rank(
    task: tuple[list[int], int], ranks: int, padded: bool
) -> None:
    lengths, budget = task

    plan = plan_packs(lengths, budget=budget, ranks=ranks, padded=padded)

    packs = [pack for of_rank in plan for pack in of_rank]
    assert sorted(unit for pack in packs for unit in pack) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert {len(of_rank) for of_rank in plan} == {len(plan[0])}
    for pack in packs:
        width = [lengths[unit] for unit in pack]
        assert (len(width) * max(width, default=0) if padded else sum(width)) <= budget
        assert width == sorted(width)


@given(LENGTHS, RANKS, st.booleans())
def test_a_plan_is_a_function_of_lengths_alone(lengths: list[int], ranks: int, padded: bool) -> None:
    first, second = (plan_packs(lengths, budget=128, ranks=ranks, padded=padded) for _ in range(2))

    assert first == second


def test_no_unit_at_all_is_one_idle_pack_for_every_rank() -> None:
    for padded in (True, False):
        assert plan_packs([], budget=10, ranks=3, padded=padded) == (((),), ((),), ((),))


def test_a_unit_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="a unit of 11 tokens does not fit a pack of 10"):
        plan_packs([3, 11], budget=10, ranks=2)


def fewest_bins(lengths: list[int], budget: int) -> int:
    """Search all ways to pack a few items."""
    best = len(lengths)
    for owners in itertools.product(range(len(lengths)), repeat=len(lengths)):
        load = np.zeros(len(lengths), dtype=int)
        np.add.at(load, list(owners), lengths)
        if load.max() <= budget:
            best = min(best, int((load > 0).sum()))
    return best


@settings(max_examples=25)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=5))
def test_few_items_take_hardly_more_bins_than_the_best_packing(lengths: list[int]) -> None:
    bins = best_fit_decreasing(lengths, 10)

    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert len(bins) <= 11 / 9 * fewest_bins(lengths, 10) + 4


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_full_bins_cut_to_pieces_are_packed_into_hardly_more_bins(count: int, seed: int) -> None:
    """The best packing of pieces of `count` full bins is `count`: the bound is tight, and known without a search."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    for _ in range(count):
        cuts = np.sort(generator.choice(np.arange(1, 1000), generator.integers(0, 7), replace=False))
        lengths += np.diff([0, *cuts, 1000]).tolist()

    bins = best_fit_decreasing(lengths, 1000)

    assert max(sum(lengths[item] for item in members) for members in bins) <= 1000
    assert len(bins) <= 11 / 9 * count + 4


def test_the_longest_goes_where_it_leaves_the_least_room() -> None:
    assert best_fit_decreasing([7, 5, 4, 3, 1], 10) == [[0, 3], [1, 2, 4]]
    assert best_fit_decreasing([6, 5, 4], 10) == [[0, 2], [1]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_uneven_lengths_evenly(ranks: int, padded: bool) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 512).astype(int).clip(8, 2048).tolist()

    plan = plan_packs(lengths, budget=8192, ranks=ranks, padded=padded)

    tokens = [sum(lengths[unit] for pack in of_rank for unit in pack) for of_rank in plan]
    cells = [sum(len(pack) * max(map(lengths.__getitem__, pack)) for pack in of_rank) for of_rank in plan]
    work = cells if padded else tokens
    assert max(work) <= 1.03 * sum(work) / ranks
    assert len(plan[0]) <= math.ceil(sum(lengths) / 8192 / ranks) + (1 if padded else 0)


def test_who_had_the_larger_pack_gets_the_smaller_one_next() -> None:
    plan = plan_packs([10, 9, 8, 7], budget=10, ranks=2)

    assert plan == (((0,), (3,)), ((1,), (2,)))


def test_packs_that_run_at_the_same_time_are_alike() -> None:
    lengths = np.random.default_rng(1).integers(10, 1000, 256).tolist()

    plan = plan_packs(lengths, budget=4096, ranks=4)

    for packs in zip(*plan, strict=True):
        tokens = [sum(lengths[unit] for unit in pack) for pack in packs]
        assert max(tokens) <= 1.1 * sum(tokens) / 4


def test_padded_rows_that_fit_one_pack_are_still_shared_out() -> None:
    plan = plan_packs([10] * 8, budget=1000, ranks=4, padded=True)

    assert [len(of_rank[0]) for of_rank in plan] == [2, 2, 2, 2]


def test_padded_rows_that_fit_one_forward_pass_take_one() -> None:
    plan = plan_packs([40, 10, 10, 10], budget=160, ranks=1, padded=True)

    assert plan == (((1, 2, 3, 0),),)


def test_the_rank_with_a_long_sequence_gets_fewer_tokens_where_attention_is_dear() -> None:
    lengths = [4000] + [1000] * 12

    shared = [
        sorted(sum(lengths[unit] for unit in of_rank[0]) for of_rank in plan)
        for plan in (plan_packs(lengths, budget=16000, ranks=2, attention_share=share) for share in (0.0, 1e-3))
    ]

    # By hand: 4000 x (1 + 4) + 1 x 1000 x (1 + 1) = 11 x 1000 x (1 + 1).
    assert shared == [[8000, 8000], [5000, 11000]]
