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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.features.trainers.checks import recomputation_is_exact, reference_is_sharded
from holdfast.parallel.mesh import World

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


def sharded(model: Any, *, by_layer: bool = True) -> Any:
    for layer in model.model.layers if by_layer else ():
        fully_shard(layer)
    fully_shard(model)
    return model


def rows_of(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def references(_: World) -> dict[str, tuple[bool, str]]:
    """Answer for references that are sharded in several ways."""
    models: dict[str, nn.Module] = {}
    for name, by_layer in (("layers", True), ("root", False)):
        models[name] = sharded(LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False), by_layer=by_layer)  # noqa: FBT003
    models["trained"] = sharded(LlamaForCausalLM(LlamaConfig(**SIZES)))
    partly = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)  # noqa: FBT003
    fully_shard(partly.model.layers[0])
    models["partly"] = partly
    policy = ModuleWrapPolicy({type(partly.model.layers[1])})
    flat = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)  # noqa: FBT003
    models["FSDP1"] = FullyShardedDataParallel(flat, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    answers = {name: reference_is_sharded(model) for name, model in models.items()}
    return {name: (bool(answer), str(answer)) for name, answer in answers.items()}


def test_a_sharded_reference_is_told_from_one_that_is_gathered_whole_trained_or_partly_sharded(pools: Any) -> None:
    one, other = pools(2).run(references)

    assert one == other
    assert {name: well for name, (well, _) in one.items()} == {
        "layers": True, "root": False, "trained": False, "partly": False, "FSDP1": True,
    }  # fmt: skip
    assert one["layers"][1] == "sharded in 3 units, and frozen"
    assert "only the root is sharded" in one["root"][1]
    assert "would be trained" in one["trained"][1]
    assert "whole on every rank" in one["partly"][1]


def recomputed(world: World, use_cache: bool) -> tuple[bool, str, int]:
    """Answer for a model that is wrapped and then sharded; also how many gradients are left behind."""
    model = sharded(wrapped(CheckpointImpl.NO_REENTRANT, "eager", use_cache=use_cache))

    answer = recomputation_is_exact(model, rows_of(world.rank))
    left = sum(value.grad is not None for value in model.parameters())

    return bool(answer), str(answer), left


def test_the_recomputation_of_a_sharded_model_is_exact_without_a_cache(pools: Any) -> None:
    for well, words, left in pools(2).run(recomputed, False):
        assert well, words
        assert left == 0


def test_the_cache_of_a_sharded_model_is_named_on_every_rank(pools: Any) -> None:
    for well, words, left in pools(2).run(recomputed, True):
        assert not well
        assert "use_cache = False" in words
        assert left == 0


def noisy(world: World) -> tuple[bool, str]:
    """Answer for a sharded model whose recomputation draws other dropout."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.5, use_cache=False)).train()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, preserve_rng_state=False),
        check_fn=lambda part: type(part).__name__ == "LlamaDecoderLayer",
    )
    answer = recomputation_is_exact(sharded(model), rows_of(world.rank))
    return bool(answer), str(answer)


def test_dropout_that_a_recomputation_draws_anew_is_named_on_a_sharded_model(pools: Any) -> None:
    for well, words in pools(2).run(noisy):
        assert not well
        assert "preserve_rng_state=False" in words
