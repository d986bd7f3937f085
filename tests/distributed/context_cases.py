"""What rank pools run to see that ranks which share a row score its tokens as one rank does."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import rotate_half
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import CommonStart, Share, pack, split_row
from holdfast.parallel.mesh import World
from holdfast.training.setup.begin import Live, build_run
from holdfast.types import Example
from tests.distributed.cases import train


def train_without_float32(world: World, tree: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Train with norms of Gemma 2 and Qwen2.5-VL, and rotary angles of Qwen's towers, in the dtype of the parameters.

    transformers computes them in float32 whatever that dtype is. Gradients then pass through float32 sums over tokens,
    which no other split of the tokens repeats to more than seven digits.
    """
    norms: tuple[Any, ...] = (Gemma2RMSNorm, modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm)
    forwards = [norm.forward for norm in norms]
    Gemma2RMSNorm.forward = _exact_norm  # type: ignore[method-assign, assignment]  # for this process, until the end
    modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm.forward = _exact_qwen_norm  # type: ignore[method-assign, assignment]
    turn = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    for towers in _TOWERS:
        towers.apply_rotary_pos_emb_vision = _exact_turn
    try:
        return train(world, tree, rows)
    finally:
        for norm, forward in zip(norms, forwards, strict=True):
            norm.forward = forward
        for towers in _TOWERS:
            towers.apply_rotary_pos_emb_vision = turn


_TOWERS: tuple[Any, ...] = (modeling_qwen2_vl, modeling_qwen2_5_vl, modeling_qwen3_vl)


def _exact_norm(norm: Any, states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.eps) * (1 + norm.weight)


def _exact_qwen_norm(norm: Any, states: Tensor) -> Tensor:
    return norm.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon))


def _exact_turn(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (angles.unsqueeze(-2).to(queries.dtype) for angles in (cos, sin))
    queries, keys = (states * cos + rotate_half(states) * sin for states in (queries, keys))
    return queries, keys


def first_lines(world: World, tree: dict[str, Any], rows: Any, local_size: int) -> list[str]:
    """Return what is printed where a run is built on machines with so many ranks each."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        build_run(from_mapping(tree, SFTConfig), Path.cwd(), replace(world, local_size=local_size), Live(rows=rows))
    return printed.getvalue().splitlines()


def document(index: int, length: int, seed: int) -> Example:
    """Return a document of random tokens, all trained but the first."""
    tokens = np.random.default_rng([seed, index]).integers(3, 90, length)
    return Example(index, index, tokens, np.arange(length) > 0)


def branched(sizes: tuple[int, ...], head: int, seed: int) -> list[Example]:
    """Return sequences that share their first `head` tokens, which are not trained, and go on by themselves."""
    start = document(99, head, seed).tokens
    found = []
    for index, size in enumerate(sizes):
        tokens = np.concatenate([start, document(index, size, seed + 1).tokens])
        found.append(Example(index, 0, tokens, np.arange(tokens.size) >= head))
    return found


def differences(world: World, tree: dict[str, Any], rows: Any, packs: list[tuple[Any, Any]]) -> list[float]:
    """Return, for each pack, how far log-probabilities of a shared row are from those of the whole row on one rank."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    policy = training.model.module.eval()
    ranks = tree["parallel"]["context"]
    found = []
    for examples, heads in packs:
        shares = [Share(1.0, 1.0)] * len(examples)
        starts = None if heads is None else [CommonStart(*head) for head in heads]
        batch = pack(examples, shares, heads=starts, multiple_of=ranks, dtype=torch.float64)
        with torch.no_grad():
            expected = policy(pack(examples, shares, heads=starts, dtype=torch.float64)).logprobs
            scored = policy(split_row(batch, world.rank % ranks, ranks)).logprobs
        found.append(float((scored - expected).abs().max()) if expected.numel() else float(scored.numel()))
    return found
