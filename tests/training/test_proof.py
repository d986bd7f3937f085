"""How far a server may differ from the trainer follows from the model; the server here is transformers in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import RunStopped
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.proof import Prover
from holdfast.parallel.mesh import World, joined_world
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live, build_model

SHALLOW = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
DEEP = {**SHALLOW, "num_hidden_layers": 24, "initializer_range": 0.8}


@dataclass
class Twin:
    """Another implementation of a policy, which answers as a server does."""

    model: Any
    url: str = "http://twin"

    def tops(self, prompt: ServedPrompt, count: int, adapter: str = "") -> list[dict[int, float]]:
        with torch.no_grad():
            logprobs = self.model(torch.tensor([list(prompt.tokens)])).logits[0].log_softmax(-1)
        rows = [dict(zip(*(part.tolist() for part in row.topk(count)[::-1]), strict=True)) for row in logprobs]
        return [{int(token): value for token, value in row.items()} for row in rows]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined_world(LaunchConfig(device="cpu")) as joined:
        yield joined


def policy_and_twin(config: dict[str, Any], world: World, dtype: torch.dtype = torch.float32) -> tuple[Model, Twin]:
    tree = {
        "parallel": {"compute_dtype": str(dtype).removeprefix("torch.")},
        "steps": 1,
        "model": {"config": {"model_type": "qwen3", **config}, "tokenizer": "builtin:characters"},
        "data": {"synthetic": {"task": "sort", "rows": 20}, "batch_size": 4, "max_length": 160},
        "reward": "exact",
    }
    run = Run.of(from_mapping(tree, GRPOConfig), Path.cwd(), world)
    model = build_model(run, Live(), lambda _: None)
    twin = Qwen3ForCausalLM(Qwen3Config(**config)).double().eval()
    state = {name: full_tensor(value).to(dtype).double() for name, value in sharded_parameters(model.module).items()}
    twin.load_state_dict(state, strict=False)
    twin.tie_weights()
    return model, Twin(twin)


def proved(model: Model, twin: Twin) -> tuple[float, float]:
    prover = Prover(None, block=16, longest=256)
    (proof,) = prover.prove(model, [twin], lambda wrong: {})  # type: ignore[list-item]
    return proof.difference, prover.limit


def test_twins_of_a_small_model_differ_by_less_than_is_measured_at_all(world: World) -> None:
    difference, limit = proved(*policy_and_twin(SHALLOW, world))

    assert difference < 2e-5
    assert limit == 1e-4


def test_a_sound_twin_of_a_deep_model_with_sharp_logits_is_within_the_measured_limit(world: World) -> None:
    draws = torch.random.get_rng_state()
    model, twin = policy_and_twin(DEEP, world)
    draws = torch.random.get_rng_state()

    difference, limit = proved(model, twin)

    assert 1e-4 < difference < limit / 2
    assert limit < 20 * difference
    assert torch.equal(torch.random.get_rng_state(), draws)


def test_a_sound_twin_in_bfloat16_is_within_the_measured_limit_and_another_rate_of_a_norm_is_not(world: World) -> None:
    model, twin = policy_and_twin(SHALLOW, world, torch.bfloat16)

    difference, limit = proved(model, twin)

    print(f"in bfloat16 the mean difference is {difference:.3f}, the limit {limit:.3f}")
    assert difference < limit < 0.1
    with torch.no_grad():
        twin.model.model.norm.weight.mul_(1.2)
    with pytest.raises(RunStopped, match="say other log-probabilities"):
        proved(model, twin)


@pytest.mark.parametrize("config", [SHALLOW, DEEP], ids=["shallow", "deep"])
@pytest.mark.parametrize("part", ["model.norm", "layers.1.mlp.up_proj", "embed_tokens"])
def test_a_tensor_of_other_values_is_beyond_the_limit(world: World, config: dict[str, Any], part: str) -> None:
    model, twin = policy_and_twin(config, world)
    spoilt = Twin(copy.deepcopy(twin.model))
    (value,) = (value for name, value in spoilt.model.named_parameters() if f"{part}.weight" in name)
    with torch.no_grad():
        value.mul_(1.01)

    with pytest.raises(RunStopped, match=r"say other log-probabilities than the trainer: http://twin by"):
        proved(model, spoilt)
