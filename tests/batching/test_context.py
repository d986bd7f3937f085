"""A packed row over the ranks of a context group: who scores which token, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.data.batches.packing import CommonStart, Share, pack, split_row, unpack
from holdfast.types import Batch, Example


def rows(seed: int) -> Batch:
    generator = np.random.default_rng(seed)
    examples = []
    for index in range(int(generator.integers(1, 6))):
        tokens = generator.integers(1, 50, int(generator.integers(1, 12)))
        mask = generator.random(tokens.size) < 0.7
        mask[0] = False
        examples.append(Example(index, index, tokens, mask))
    return pack(examples, [Share(1.0, 0.5)] * len(examples), multiple_of=4)


def branches() -> Batch:
    head = np.arange(1, 6)
    examples = [
        Example(index, 0, np.concatenate([head, np.full(size, 7 + index)]), np.arange(5 + size) >= 5)
        for index, size in enumerate((3, 1, 4))
    ]
    return pack(examples, [Share(1.0, 1.0)] * 3, heads=[CommonStart(3, 5)], multiple_of=4)


@pytest.mark.parametrize("batch", [*map(rows, range(20)), branches()])
def test_a_token_is_scored_by_the_rank_that_has_its_predictor(batch: Batch) -> None:
    width = batch.tokens.shape[1]
    spans = [split_row(batch, rank, 4) for rank in range(4)]

    seen: list[int] = []
    for rank, of_rank in enumerate(spans):
        assert of_rank.span == (rank * width // 4, (rank + 1) * width // 4)
        assert of_rank.scored_in_span is not None
        scored = batch.scored[of_rank.scored_in_span]
        predictors = batch.predictor_index[0, scored]
        assert ((predictors >= of_rank.span[0]) & (predictors < of_rank.span[1])).all()
        seen += scored.tolist()
    assert sorted(seen) == batch.scored.tolist()


def test_the_first_rank_alone_counts_sequences() -> None:
    batch = rows(3)

    counts = [split_row(batch, rank, 4).count for rank in range(4)]

    assert counts == [batch.count, 0.0, 0.0, 0.0]
    assert batch.count > 0


@pytest.mark.parametrize("batch", [*map(rows, range(5)), branches()])
def test_a_row_is_padded_so_that_spans_are_equal_and_unpacks_as_it_was(batch: Batch) -> None:
    examples = unpack(batch)

    assert batch.tokens.shape[1] % 4 == 0
    assert sum(batch.lengths[0]) == batch.tokens.shape[1]
    assert len(examples) == len(batch.sample_ids)
    assert sum(int(example.loss_mask.sum()) for example in examples) == batch.scored.numel()
    padding = batch.tokens.shape[1] - sum(example.tokens.size for example in examples) + 10 * bool(any(batch.branches))
    assert 0 <= padding < 4


def test_a_batch_that_one_rank_has_is_not_padded() -> None:
    batch = pack([Example(0, 0, np.arange(1, 8), np.arange(7) > 0)], [Share(1.0, 1.0)])

    assert batch.tokens.shape == (1, 7)
    assert batch.span is None
    assert batch.scored_in_span is None
    assert torch.equal(batch.scored, torch.arange(1, 7))
