"""Log-probabilities of a mini-batch under a model that is not updated, as a column of its tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from holdfast.data.batches.packing import to_device
from holdfast.training.run import ShardedModel
from holdfast.training.scorers.reference import Reference
from holdfast.training.scorers.server import ScoringServer
from holdfast.types import Batch, MiniBatch, Scores


@torch.no_grad()
def scored(
    sharded: ShardedModel, model: Reference, mini_batch: MiniBatch, name: str, *, entropy: bool = False
) -> MiniBatch:
    """Add a model's log-probabilities, and perhaps `entropy`, to every trained token; all ranks call this together.

    Args:
        sharded: Where the batch goes, and at which temperature it is scored.
        model: Scores a batch.
        mini_batch: What is scored.
        name: Of the column.
        entropy: Also add entropies.
    """
    if isinstance(model, ScoringServer):
        return model.scored(mini_batch, name)
    batches = []
    for micro_batch in mini_batch.micro_batches:
        batch = to_device(micro_batch, sharded.setting.world.device)
        scores = model(batch, temperature=sharded.temperature, entropy=entropy)
        assert isinstance(scores, Scores)
        added = {name: on_tokens(batch, scores.logprobs)}
        if scores.entropy is not None:
            added["entropy"] = on_tokens(batch, scores.entropy)
        batches.append(replace(batch, per_token={**batch.per_token, **added}))
    return replace(mini_batch, micro_batches=tuple(batches))


def on_tokens(batch: Batch, values: Tensor) -> Tensor:
    """Return [B, T] with [N] values at the scored tokens and 0 elsewhere."""
    spread = values.new_zeros(batch.tokens.numel())
    spread[batch.scored] = values.detach()
    return spread.view_as(batch.tokens)
