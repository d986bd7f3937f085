"""Losses of a policy through a real tiny model: our head in both forms, and plain transformers with autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.batches.packing import Share, pack
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import PACKED, register_attention
from holdfast.models.layers.family import family_of
from holdfast.objectives.base import Objective, Tokens, scored_tokens
from holdfast.types import Batch, Example, LossSum, Scores
from tests.models.architectures import twin

LENGTHS, WEIGHTS = (9, 14, 6), (0.25, 1.0, 0.5)
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Recomputed:
    """An objective that asks for the head's other form."""

    inner: Objective
    separable: bool = False

    @property
    def needs_entropy(self) -> bool:
        return self.inner.needs_entropy

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        return self.inner.token_terms(logprobs, entropy, tokens)

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        return self.inner.sums(scores, tokens)


def by_transformers(model: Any) -> tuple[Tensor, Tensor]:
    """Return [T] log-probabilities and entropies of the batch, document by document, with their graph."""
    logprobs, entropies = [], []
    for document in torch.split(tokens_drawn(), LENGTHS):
        full = model(input_ids=document[None]).logits[0].double().log_softmax(-1)[:-1]
        start = full.new_zeros(1)  # the first token, which nothing predicts
        logprobs.append(torch.cat([start, full.gather(1, document[1:, None]).squeeze(1)]))
        entropies.append(torch.cat([start, -(full.exp() * full).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


def tokens_drawn() -> Tensor:
    return torch.tensor(np.random.default_rng(1).integers(0, 96, sum(LENGTHS)))


def a_batch(model: Any, *, proximal: bool) -> Batch:
    """Pack three completions whose carried log-probabilities lie near the model's own."""
    generator = np.random.default_rng(2)
    with torch.no_grad():
        own = by_transformers(model)[0].numpy()
    carried = {
        name: own + 0.3 * generator.normal(size=own.size)
        for name in ("proximal_logprobs", "sampler_logprobs", "reference_logprobs")
    } | {"advantages": generator.normal(size=own.size), "entropy_mask": generator.random(own.size) < 0.5}
    if not proximal:
        del carried["proximal_logprobs"]
    examples, start = [], 0
    for index, length in enumerate(LENGTHS):
        stretch = slice(start, start := start + length)
        mask = generator.random(length) < 0.7
        mask[0] = False
        per_token = {name: values[stretch] for name, values in carried.items()}
        examples.append(Example(index, index, tokens_drawn()[stretch].numpy(), mask, per_token=per_token))
    return pack(examples, [Share(weight, 1.0) for weight in WEIGHTS], dtype=torch.float64)


def through_our_head(model: Any, objective: Objective, batch: Batch) -> tuple[LossSum, Gradients]:
    register_attention()
    mine = twin(model)
    mine.set_attn_implementation(PACKED)
    family = family_of(mine)
    policy = PolicyModel(mine, family, family.head_spec(float32_product=False, chunk_tokens=5))
    result = policy(batch, objective)
    assert isinstance(result, LossSum)
    result.loss.backward()
    return result, gradients_of(mine)


def through_transformers(model: Any, objective: Objective, batch: Batch) -> tuple[Tensor, Gradients]:
    theirs = twin(model)
    logprobs, entropies = (values[batch.scored] for values in by_transformers(theirs))
    terms = objective.token_terms(logprobs, entropies if objective.needs_entropy else None, scored_tokens(batch))
    loss = (terms * batch.weights.flatten()[batch.scored]).sum()
    loss.backward()
    return loss, gradients_of(theirs)


def gradients_of(model: Any) -> Gradients:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
