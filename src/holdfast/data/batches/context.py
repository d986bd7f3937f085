"""Split a packed row over the ranks of a context group.

Every rank of the group keeps the batch as it is, and computes the hidden states of one span of its positions. A token
is scored by the rank whose span holds its predictor, so no token needs a hidden state of another rank, wherever the
borders of documents lie. Sequences are counted by the first rank of the group alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.types import Batch


def split_rows(batches: Sequence[Batch], rank: int, context: int) -> tuple[Batch, ...]:
    """Return the batches of a context group for one of all ranks, whose groups are neighbours."""
    return tuple(batches) if context == 1 else tuple(split_row(batch, rank % context, context) for batch in batches)


def split_row(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the batch for one rank of a context group; the row's width is a multiple of `ranks`."""
    rows, width = batch.tokens.shape
    assert rows == 1, "rows are packed"
    assert width % ranks == 0, "the row was not padded"
    start, end = rank * width // ranks, (rank + 1) * width // ranks
    predictors = batch.predictor_index.flatten()[batch.scored]
    inside = ((predictors >= start) & (predictors < end)).nonzero().flatten()
    counted = batch if rank == 0 else replace(batch, counts=tuple(0.0 for _ in batch.counts), count=0.0)
    return replace(counted, span=(start, end), scored_in_span=inside)
