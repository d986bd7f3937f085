"""A pair stays in one forward pass, the chosen sequence before the rejected one, and counts once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.verbs.dpo import PairDataConfig
from holdfast.data.batches.assembly import Layout, assemble, plan_units, shares
from holdfast.data.batches.candidates import Candidates, SequenceInfo
from holdfast.data.batches.packing import Share, unpack
from holdfast.types import Example, MiniBatch

Sizes = Sequence[tuple[int, int, int]]
"""Of each pair: tokens of the prompt, of the chosen and of the rejected answer."""


class OneOf:
    """A rank of several that holds everything: what it would receive from the others is here already."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, item: object) -> list[object]:
        raise AssertionError("nothing is asked")

    def swap(self, outgoing: Sequence[dict[int, Example]]) -> list[dict[int, Example]]:
        return [outgoing[self.rank]]


def mini_batch(sizes: Sizes, rank: int, ranks: int, budget: int, layout: Layout) -> MiniBatch:
    generator = np.random.default_rng(0)
    mine, known = {}, []
    for draw, (head, *answers) in enumerate(sizes):
        prompt = generator.integers(2, 90, head)
        for part, size in enumerate(answers):
            tokens = np.concatenate([prompt, generator.integers(2, 90, size)])
            mine[draw, part] = Example(draw, draw, tokens, np.arange(tokens.size) >= head, "s")
            known.append(SequenceInfo(draw, part, tokens.size, size, rank, head))
    config = PairDataConfig(path="x", max_length=budget // 2, tokens_per_micro_batch=budget)
    return assemble(Candidates(mine, known), OneOf(rank, ranks), config, layout)


@pytest.mark.parametrize("layout", [
    Layout(whole_draws=True, shares_heads=True),
    Layout(whole_draws=True),
    Layout(whole_draws=True, padded=True),
], ids=["shared", "repeated", "padded"])  # fmt: skip
@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    budget=st.sampled_from([40, 64, 400]),
)
def test_every_pair_is_whole_in_one_micro_batch(layout: Layout, sizes: Sizes, ranks: int, budget: int) -> None:
    found = [mini_batch(sizes, rank, ranks, budget, layout) for rank in range(ranks)]

    seen = []
    for batch in (batch for part in found for batch in part.micro_batches):
        assert batch.tokens.numel() <= budget
        ids = list(batch.sample_ids)
        assert ids[::2] == ids[1::2]
        seen += ids[::2]
        for index, example in enumerate(unpack(batch)):
            assert example.tokens.size == sizes[example.sample_id][0] + sizes[example.sample_id][1 + index % 2]
        assert batch.count == len(ids) / 2
        assert set(batch.weights[batch.loss_mask].tolist()) <= {1.0}
    assert sorted(seen) == list(range(len(sizes)))
    assert {part.count for part in found} == {float(len(sizes))}
    assert len({len(part.micro_batches) for part in found}) == 1


def test_whole_draws_are_units_even_if_they_share_nothing() -> None:
    units = plan_units([5, 6, 4, 4], [0, 0, 2, 2], [1, 1, 2, 2], 12, whole_draws=True)

    assert [(unit.members, unit.head, unit.tokens) for unit in units] == [((0, 1), 0, 11), ((2, 3), 2, 6)]


def test_the_sequences_of_a_pair_count_half_each() -> None:
    found = shares("pair_mean", [3, 5, 2, 2], [8, 8, 9, 9], 64)

    assert found == [Share(1.0, 0.5)] * 4
