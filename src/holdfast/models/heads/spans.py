"""Which tokens of a batch a rank scores, and how ranks that share its row come to the scores of all of them.

Under context parallelism a rank computes the hidden states of a span of the row, and scores the tokens that they
predict. The scores of all tokens are a sum over the group, to which a rank gives 0 for tokens of other ranks. So an
objective that needs whole sequences sees them, and whoever reads scores finds those of the whole batch on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.models.layers.document_attention import Documents
from holdfast.models.layers.exchange import RowExchange
from holdfast.objectives.base import Tokens
from holdfast.types import Batch, Scores


def scored_here(batch: Batch) -> Tensor:
    """Return [n] flat positions of the tokens that this rank scores."""
    return batch.scored if batch.scored_in_span is None else batch.scored[batch.scored_in_span]


def scored_positions(batch: Batch) -> Tensor:
    """Return flat positions, within this rank's span, of the scored tokens that lie in it."""
    if batch.span is None:
        return batch.scored
    start, end = batch.span
    return batch.scored[(batch.scored >= start) & (batch.scored < end)] - start


def predictors(batch: Batch) -> Tensor:
    """Return [n] flat positions, within this rank's span, of the hidden states that predict the tokens it scores."""
    positions = _predictors_of(scored_here(batch), batch)
    return positions if batch.span is None else positions - batch.span[0]


def predictors_of_all(batch: Batch) -> Tensor:
    """Return [N] flat positions of the hidden states that predict the scored tokens, those of other ranks included."""
    return _predictors_of(batch.scored, batch)


def _predictors_of(scored: Tensor, batch: Batch) -> Tensor:
    width = batch.tokens.shape[1]
    return scored // width * width + batch.predictor_index.flatten()[scored]


def read_at(
    positions: Tensor,
    hidden: Tensor,
    batch: Batch,
    exchange: RowExchange | None,
    read: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return [N, ...], what `read` makes of the hidden states at flat positions of all ranks' spans; differentiable.

    Args:
        positions: [N] int64
        hidden: Of this rank's span.
        batch: The batch.
        exchange: The group of ranks that share its row.
        read: Of [N, H]; a row of its result depends on one hidden state.
    """
    states = hidden.flatten(0, 1)
    if batch.span is None:
        return read(states.index_select(0, positions))
    assert exchange is not None
    start, end = batch.span
    inside = (positions >= start) & (positions < end)
    values = read(states.index_select(0, (positions - start).clamp(0, end - start - 1)))
    return exchange.add(torch.where(inside.view(-1, *[1] * (values.ndim - 1)), values, 0.0))


def documents_of(batch: Batch, exchange: RowExchange | None) -> Documents:
    """Return the documents of a packed batch, and with whom this rank exchanges around attention."""
    shared = None if batch.span is None else exchange
    return Documents.of(batch.lengths[0], batch.tokens.device, batch.branches, shared)


def tokens_here(tokens: Tokens, batch: Batch) -> Tokens:
    """Return what belongs to the tokens that this rank scores."""
    index = batch.scored_in_span
    if index is None:
        return tokens
    return Tokens(
        tokens.weights[index],
        {name: values[index] for name, values in tokens.per_token.items()},
        tokens.sequence[index],
        tokens.sequences,
    )


def is_counted(batch: Batch) -> bool:
    """Whether this rank counts what all ranks of its group compute alike, such as a loss of whole sequences."""
    return batch.span is None or batch.span[0] == 0


def first_ranks_loss(loss: Tensor, batch: Batch) -> Tensor:
    """Return a loss of the whole batch, which all ranks of its group computed; 0 on all but the first."""
    return loss if is_counted(batch) else loss * 0.0


def counted_once(sums: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return metrics of the whole batch; 0 on all ranks of its group but the first."""
    return sums if is_counted(batch) else {name: values.new_zeros(values.shape) for name, values in sums.items()}


def scores_of_all(scores: Scores, batch: Batch, exchange: RowExchange | None) -> Scores:
    """Return the scores [N] of all scored tokens of a batch, given those [n] of this rank; differentiable."""
    index = batch.scored_in_span
    if index is None:
        return scores
    assert exchange is not None

    def of_all(values: Tensor) -> Tensor:
        spread = values.new_zeros(batch.scored.shape[0])
        return exchange.add(spread.index_copy(0, index, values))

    entropy = None if scores.entropy is None else of_all(scores.entropy)
    return Scores(of_all(scores.values), of_all(scores.accuracy), entropy)
