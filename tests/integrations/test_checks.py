"""Two checks for any script: they name the cause of reports 002 and 004, and are silent where all is well."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.integrations.checks import recomputation_is_exact, reference_is_sharded

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def wrapped(implementation: CheckpointImpl, attention: str, *, use_cache: bool) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention, use_cache=use_cache)).train()
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda part: type(part).__name__ == "LlamaDecoderLayer"
    )
    return model


def rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("implementation", "attention"),
    [(CheckpointImpl.NO_REENTRANT, "eager"), (CheckpointImpl.REENTRANT, "eager"), (CheckpointImpl.REENTRANT, "sdpa")],
)
def test_a_cache_that_the_recomputation_writes_again_is_named(implementation: CheckpointImpl, attention: str) -> None:
    model = wrapped(implementation, attention, use_cache=True)

    answer = recomputation_is_exact(model, rows())

    assert not answer
    assert "use_cache = False" in str(answer)


def test_without_the_cache_the_recomputation_is_exact_and_nothing_is_left_behind() -> None:
    model = wrapped(CheckpointImpl.NO_REENTRANT, "eager", use_cache=False)

    answer = recomputation_is_exact(model, rows())

    assert answer, str(answer)
    assert all(value.grad is None for value in model.parameters())
    assert any(type(part).__name__ == "CheckpointWrapper" for part in model.modules())


def test_a_reference_that_nobody_sharded_is_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)  # noqa: FBT003

    answer = reference_is_sharded(model)

    assert not answer
    assert "whole on every rank, on cpu" in str(answer)
