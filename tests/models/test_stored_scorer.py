"""Models that score: the check at start against all of their class's own forward pass, and the loss of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from holdfast.data.batches.packing import Share, pack
from holdfast.errors import ModelError
from holdfast.models.check.forward import check_forward
from holdfast.models.heads.scorer import ScoreModel, StoredScoreModel
from holdfast.models.layers.family import family_of
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.types import Example
from tests.models.sides import sides_of
from tests.tiny import COMMON

DTYPES = [torch.float32, torch.bfloat16]


class AtTheFirstToken(LlamaForSequenceClassification):
    """A class that scores a text at another token than those of transformers do."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        """Score the first token alone."""
        return super().forward(input_ids=input_ids[:, :1], **options)


class Rounded(LlamaForSequenceClassification):
    """A class whose scores are a hundredth off, as bfloat16 makes them where it rounds in other places."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        """Score as its parent does, nearly."""
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits * 1.01
        return output


def scorer(
    made: type[Any],
    dtype: torch.dtype,
    size: float = 1.0,
    outputs: int = 2,
    kind: type[ScoreModel] = StoredScoreModel,
) -> ScoreModel:
    torch.manual_seed(0)
    model = made(AutoConfig.for_model("llama", **COMMON, num_labels=outputs))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        model.score.weight.mul_(size)
    family = family_of(model)
    spec = family.head_spec(float32_product=False, chunk_tokens=None)
    return kind(model.to(dtype), family, spec, padded=True)


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_class_that_scores_by_another_rule_is_found_out_at_start(dtype: torch.dtype, size: float) -> None:
    check_forward(sides_of(scorer(LlamaForSequenceClassification, dtype, size), dtype), may_fall_back=False)

    with pytest.raises(ModelError, match="differ from transformers' own"):
        check_forward(sides_of(scorer(AtTheFirstToken, dtype, size), dtype), may_fall_back=False)


def test_large_scores_may_be_rounded_in_proportion() -> None:
    large = scorer(Rounded, torch.bfloat16, 300.0)

    result, _ = check_forward(sides_of(large, torch.bfloat16), may_fall_back=False)

    assert 0.001 < result.difference < 0.1
    with pytest.raises(ModelError, match="differ from transformers' own"):
        check_forward(sides_of(scorer(Rounded, torch.float32, 300.0)), may_fall_back=False)


def test_each_token_counts_by_the_weight_of_its_sequence() -> None:
    model = scorer(LlamaForSequenceClassification, torch.float64, outputs=1, kind=ScoreModel)
    examples = [Example(size, size, np.arange(2, 2 + size), np.arange(size) > 0) for size in (5, 8)]
    batch = pack(examples, [Share(0.25, 1.0), Share(3.0, 1.0)], padded=True)

    loss = model(batch, NegativeLogLikelihood()).loss

    scores = [model.upstream_values(torch.from_numpy(example.tokens)) for example in examples]
    assert loss.item() == pytest.approx(-(0.25 * scores[0].sum() + 3.0 * scores[1].sum()).item(), rel=1e-10)
