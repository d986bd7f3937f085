"""Causes of a mismatch, one by one: what an engine with each of them would tell is told, and the cause is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.features.forensics.mismatch import Fit, at_temperature, causes, fits, fits_without, trainer, verdict
from holdfast.features.forensics.other_engines import fits_elsewhere, plain_copy
from holdfast.models.layers.attention import cache_argument, cache_of
from holdfast.models.layers.routers import routers_of
from holdfast.parallel.mesh import joined_world
from holdfast.rollout.local.replica import Replica
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live, build_model
from holdfast.types import Finish, Group, Prompt, Trajectory
from tests.features.vllm.served import MODEL, served_tree

EXPERTS: dict[str, Any] = {
    **{name: value for name, value in MODEL.items() if name != "head_dim"},
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def warmer(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **more: Any) -> Any:
    """Attend a little more evenly than a model says, as a kernel with a mistake does."""
    return eager_attention_forward(module, query, key, value, mask, scaling=0.9 * scaling, **more)


def policy(tmp_path: Path, world: Any, model: dict[str, Any], head: str = "model", dtype: str = "auto") -> Model:
    """Build a policy."""
    tree = served_tree(["http://127.0.0.1:9"], str(tmp_path))
    tree["model"] |= {"config": model, "head": {"dtype": head}}
    tree["parallel"] = {"compute_dtype": dtype}
    config = from_mapping(tree, GRPOConfig)
    return build_model(Run.of(config, tmp_path, world), Live(), lambda _: None)


def groups(told: Callable[[torch.Tensor, int], torch.Tensor], tokens_from: int = 4) -> list[Group]:
    """Return completions of random tokens, each ended by a stop, with what an engine tells of them."""
    draw, made = np.random.default_rng(5), []
    for number in range(6):
        prompt = draw.integers(tokens_from, 40, 40).astype(np.int64)
        tokens = np.concatenate([prompt, draw.integers(tokens_from, 40, 12)])
        logprobs = told(torch.from_numpy(tokens), prompt.size).numpy().astype(np.float32)
        made.append(
            Group(
                Prompt(number, prompt, "", {}),
                (
                    Trajectory(
                        prompt_id=number,
                        sample_id=number,
                        seed=0,
                        temperature=1.0,
                        tokens=tokens,
                        loss_mask=np.arange(tokens.size) >= prompt.size,
                        sampler_logprobs=np.concatenate([np.zeros(prompt.size, np.float32), logprobs]),
                        weights_versions=np.zeros(tokens.size, np.int32),
                        finish=Finish.STOP,
                    ),
                ),
            )
        )
    return made


@torch.no_grad()
def whole(model: Any, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return what a plain model says of the tokens behind a prompt."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, size - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, tokens[size:, None])[:, 0]


def told_of(model: Model, sampled: list[Group], earlier: Replica | None = None, **more: Any) -> tuple[str, list[Fit]]:
    """Return the sentence, and what was tried, as `explain-mismatch` does."""
    nothing, *ranked = fits(model, sampled, causes(1.0))
    others = fits_without(model, sampled, at_temperature(1.0))
    others += fits_elsewhere(model, sampled, at_temperature(1.0), earlier and (earlier, "step 3"), **more)
    tried = sorted([*ranked, *others], key=lambda fit: fit.mean)
    return verdict(tried, nothing, "float32"), tried


def moved(model: Model) -> None:
    """Change all weights, as updates do."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.module.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=draw))


@pytest.fixture(scope="module")
def world() -> Any:
    with joined_world(LaunchConfig(device="cpu")) as joined:
        yield joined


def test_nothing_is_named_for_a_clean_pair(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, MODEL)
    engine = plain_copy(model).model

    words, _ = told_of(model, groups(lambda tokens, size: whole(engine, tokens, size)), plain_copy(model))

    assert words.startswith("nothing to explain")


@pytest.mark.parametrize(("head", "rounded"), [("model", True), ("float32", False)])
def test_logits_are_rounded_as_the_head_is_told(tmp_path: Path, world: Any, head: str, rounded: bool) -> None:
    model = policy(tmp_path, world, MODEL, head, "bfloat16")

    with torch.no_grad():
        logits = trainer(model)(torch.arange(4, 52), 40)

    assert logits.shape == (8, 64)
    assert bool((logits.bfloat16().float() == logits).all()) == rounded


def test_keys_and_values_of_older_weights_are_named(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, MODEL)
    earlier = plain_copy(model)
    moved(model)
    present = plain_copy(model).model

    @torch.no_grad()
    def told(tokens: torch.Tensor, size: int) -> torch.Tensor:
        old = cache_argument(present, cache_of(earlier.model(input_ids=tokens[None, :32], use_cache=True)))
        logits = present(input_ids=tokens[None, 32:], **old).logits[0, size - 33 : -1].float()
        return logits.log_softmax(-1).gather(1, tokens[size:, None])[:, 0]

    words, _ = told_of(model, groups(told), earlier)

    assert words.startswith("prefix cache: keys and values of prompts are of step 3, whole blocks of 16 tokens:")


def test_another_kernel_is_named(tmp_path: Path, world: Any) -> None:
    AttentionInterface.register("warmer", warmer)
    model = policy(tmp_path, world, MODEL)
    engine = plain_copy(model, attention="warmer").model

    sampled = groups(lambda tokens, size: whole(engine, tokens, size))
    words, _ = told_of(model, sampled, kernels=("eager", "sdpa", "warmer"))

    assert words.startswith("kernel: attention by transformers' warmer:"), words


def test_computing_in_bfloat16_is_named(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, MODEL)
    engine = plain_copy(model, torch.bfloat16).model

    words, _ = told_of(model, groups(lambda tokens, size: whole(engine, tokens, size)))

    assert words.startswith("dtype: computed in bfloat16:"), words


def test_tokens_that_end_completions_are_named(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, MODEL)
    engine = plain_copy(model).model

    def told(tokens: torch.Tensor, size: int) -> torch.Tensor:
        logprobs = whole(engine, tokens, size)
        logprobs[-1] = -9.0
        return logprobs

    words, _ = told_of(model, groups(told))

    assert words.startswith("stop tokens: all but the tokens that end completions agree:"), words


def test_tokens_that_were_encoded_again_are_named(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, MODEL)
    engine, tokenizer = plain_copy(model).model, model.blueprint.tokenizer
    unknown = [token for token in range(64) if tokenizer.encode(tokenizer.decode([token])) != [token]]

    def told(tokens: torch.Tensor, size: int) -> torch.Tensor:
        logprobs = whole(engine, tokens, size)
        again = tokenizer.encode(tokenizer.decode(tokens[size:].tolist()), add_special_tokens=False)
        return logprobs if again == tokens[size:].tolist() else logprobs - 0.5

    sampled = groups(told)
    for group in sampled[:3]:
        trajectory = group.trajectories[0]
        trajectory.tokens[45] = unknown[0]
        trajectory.sampler_logprobs[40:] = told(torch.from_numpy(trajectory.tokens), 40).numpy()
    words, _ = told_of(model, sampled)

    assert words.startswith("re-encoding: all completions agree whose text is cut into the same tokens again:"), words


def test_tokens_near_a_tie_of_experts_are_named(tmp_path: Path, world: Any) -> None:
    model = policy(tmp_path, world, EXPERTS)
    engine, low = plain_copy(model), plain_copy(model, torch.bfloat16)
    routers = [routers_of(each.model)[0][0] for each in (engine, low)]
    chosen: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2].sort(-1).values))

    def told(tokens: torch.Tensor, size: int) -> torch.Tensor:
        chosen.clear()
        logprobs = whole(engine.model, tokens, size)
        whole(low.model, tokens, size)
        near_a_tie = (chosen[0] != chosen[1]).any(-1)[size - 1 : -1]
        return torch.where(near_a_tie, logprobs - 1.0, logprobs)

    words, _ = told_of(model, groups(told))

    assert words.startswith("routing: all but tokens whose experts change by rounding agree:"), words
