"""Choose the engine that samples from a policy, and check that a rank has memory for unsharded weights."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import psutil
import torch
from torch import nn

from holdfast import registry
from holdfast.config.sections.engine import (
    LocalEngineConfig,
    LocalKind,
    RecordedEngineConfig,
    UserEngineConfig,
    VLLMEngineConfig,
)
from holdfast.config.sections.rollout import EngineConfig, EngineSection, GraphsKind
from holdfast.data.batches.assembly import Layout
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.models.check.shrink import layers_in
from holdfast.models.layers.rotary import angles_by_length
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.host_memory import common_bytes, live_tensors
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part
from holdfast.rollout.engine import RolloutEngine
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.graphs import CudaRecorder
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.local.recurrent import agree_on_decoding, why_not_in_process
from holdfast.rollout.sampling import Stops
from holdfast.training.cache_blocks import (
    blocks_with_room,
    cache_blocks,
    completion_bytes,
    refuse_no_room,
    settle_blocks,
)
from holdfast.training.observe import load_function
from holdfast.training.pieces import settle_pieces
from holdfast.training.run import ShardedModel


class PublishedEngine(ABC):
    """An engine in other processes, to which the ranks push their shards directly."""

    @abstractmethod
    def publish(self, sharded: ShardedModel) -> None:
        """Push the present weights, and prove that they arrived; all ranks call this together."""

    def step_metrics(self) -> dict[str, float]:
        """Return what the engine measured since the last call; all ranks call this together, and get the same."""
        return {}


def open_engine(
    sharded: ShardedModel,
    rollout: EngineConfig,
    context: int,
    *,
    tells_experts: bool = False,
    trains: bool = True,
    planned: bool = False,
) -> RolloutEngine:
    """Return the engine of a run's rollouts, if completions end and there is room for what it decodes over.

    All ranks call this together, and all of them raise what any of them raises.

    Args:
        sharded: The policy.
        rollout: How it is sampled.
        context: Tokens that a completion may follow.
        tells_experts: Completions say which experts their tokens met.
        trains: The policy will have an optimizer's state; without it there is more room for keys and values.
        planned: The run is only planned: where memory has no room, its table says so, and what to turn.

    Raises:
        ConfigError: Completions do not end, memory has no room, or the engine cannot decode this model.
    """
    section, ranks = rollout.engine, sharded.setting.ranks
    ranks.on_all_ranks(lambda: _refuse_endless(sharded, rollout))
    if isinstance(section, VLLMEngineConfig):
        ranks.on_all_ranks(lambda: _refuse_unserved(sharded, tells_experts=tells_experts))
        served: RolloutEngine = registry.load(registry.ENGINES[section.kind])(sharded, section, stops_of(sharded))
        return served
    if isinstance(section, RecordedEngineConfig):
        open_recorded = registry.load(registry.ENGINES[section.kind])
        recorded: RolloutEngine = ranks.on_all_ranks(lambda: open_recorded(sharded.setting.base / section.path))
        return recorded
    if isinstance(section, UserEngineConfig):
        make = load_function(section.path, sharded.setting.base, "rollout.engine.path")
        return ranks.on_all_ranks(lambda: _user_engine(make(**section.kwargs), section.path))
    common, kind = shared_by_ranks(sharded), section.kind
    agree_on_decoding(sharded.origin, ranks.gather)

    def opened() -> RolloutEngine:
        if not planned or rollout.copy_gib is not None:
            check_copy_fits(sharded, rollout.copy_gib, common, in_process=samples_in_process(sharded, kind))
        return build_engine(sharded, kind, rollout.rows, rollout.graphs, tells_experts=tells_experts)

    engine = ranks.on_all_ranks(opened)
    if isinstance(engine, InProcessEngine):
        free = free_bytes(sharded.setting.world) - _expected_bytes(sharded, common, trains=trains)
        tokens = context + _most_sampled(sharded, rollout)
        if not planned:
            ranks.on_all_ranks(lambda: refuse_no_room(sharded, tokens, free))
        elif completion_bytes(sharded, tokens) > free:
            free = sys.maxsize  # what the run would take, had it the memory
        engine.block_limit = min(ranks.gather(cache_blocks(sharded, rollout.rows, tokens, free)))
        engine.block_room = min(ranks.gather(blocks_with_room(sharded, free)))
        engine.longest = tokens  # a row that was paused begins with what it has drawn
    return engine


def _most_sampled(sharded: ShardedModel, rollout: EngineConfig) -> int:
    """Return the most tokens of a completion, those of evaluations included."""
    sampling = getattr(sharded.setting.config.evaluation, "sampling", None)
    return max(rollout.max_new_tokens, (sampling and sampling.max_new_tokens) or 0)


_STATE_SIZES = {"adamw_bf16": 3.0, "adamw_8bit": 0.51, "adamw_fp8": 0.51, "adamw_4bit": 0.27, "sgd": 1.0}
"""Bytes of an optimizer's state for each byte of the parameters that it updates; two for all other optimizers."""


def _expected_bytes(sharded: ShardedModel, common: int, *, trains: bool) -> int:
    """Return what this rank's device will hold while completions are sampled, beside what it holds now.

    That is the copy of the weights, matrices laid out for decoding, and an optimizer's state, unless that is there
    already or in host memory. Gradients are freed before.
    """
    copied, config = copy_bytes(sharded, common) + layout_bytes(sharded), sharded.setting.config
    residency = getattr(config, "residency", None)
    offloaded = "optimizer" in config.parallel.offloads or (residency is not None and residency.optimizer == "host")
    has_state = any(getattr(getattr(sharded, "optimizer", None), "state", {}).values())
    if not trains or has_state or (offloaded and sharded.setting.world.device.type != "cpu"):
        return copied
    trained = sum(local_part(value).nbytes for value in sharded.model.parameters() if value.requires_grad)
    return copied + int(_STATE_SIZES.get(config.optim.kind, 2.0) * trained)


def _refuse_endless(sharded: ShardedModel, rollout: EngineConfig) -> None:
    if not stop_tokens(sharded.origin) and not rollout.stop:
        raise ConfigError(
            "Nothing ends a completion: the tokenizer has no end-of-sequence token, and rollout.stop names no "
            "text. Give the tokenizer an eos_token, or set rollout.stop."
        )


def _refuse_unserved(sharded: ShardedModel, *, tells_experts: bool) -> None:
    """Refuse what servers do not do.

    Raises:
        ConfigError: The run needs it.
    """
    if tells_experts:
        raise ConfigError("rollout.replay_routing: servers do not tell us experts. Leave it out.")
    if sharded.plan.compute_dtype not in {"float32", "bfloat16"}:
        raise ConfigError(
            f"rollout.engine: vllm computes in float32 or bfloat16, and this run in {sharded.plan.compute_dtype}. Set "
            "parallel.compute_dtype."
        )


_MEMBERS = ("update_weights", "submit", "collect", "sleep", "close")


def _user_engine(engine: Any, path: str) -> RolloutEngine:
    missing = [name for name in _MEMBERS if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(
            f"rollout.engine.path: what {path} returns has no {', '.join(missing)}; an engine has the members of "
            "holdfast.rollout.engine.RolloutEngine."
        )
    rollout_engine: RolloutEngine = engine
    return rollout_engine


def give_weights(engine: RolloutEngine, sharded: ShardedModel) -> None:
    """Let an engine take over the policy's present weights; all ranks call this together."""
    if isinstance(engine, PublishedEngine):
        engine.publish(sharded)
        return
    if isinstance(engine, InProcessEngine) and engine.block_limit is not None:
        # The run may have been continued since the engine was opened.
        settle_blocks(sharded, engine, engine.block_room)
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    engine.update_weights(live_tensors(sharded.model, sharded.setting.ranks, dtype), sharded.state.updates)
    if isinstance(engine, InProcessEngine):
        settle_pieces(sharded, engine)


def limit_blocks(engine: RolloutEngine, sharded: ShardedModel) -> None:
    """Let an engine that has its weights, and that no run keeps, have as many blocks as there is memory for now."""
    if isinstance(engine, InProcessEngine):
        room = blocks_with_room(sharded, free_bytes(sharded.setting.world))
        engine.block_limit = max(1, min(sharded.setting.ranks.gather(room)))


def build_engine(
    sharded: ShardedModel,
    kind: LocalKind = "auto",
    rows: int = 512,
    graphs: GraphsKind = "off",
    *,
    tells_experts: bool = False,
) -> RolloutEngine:
    """Return an engine without weights: our own decoding where the model's attention allows it.

    Args:
        sharded: The policy.
        kind: Which engine.
        rows: Most completions decoded together.
        graphs: Whether our own decoding replays recorded steps on CUDA; `off` where no key of a run says.
        tells_experts: Completions say which experts their tokens met.

    Raises:
        ConfigError: The engine that was asked for cannot decode this model.
    """
    origin, tokenizer, device = sharded.origin, sharded.origin.tokenizer, sharded.setting.world.device
    stops, dtype = stops_of(sharded), getattr(torch, sharded.plan.compute_dtype)
    why = why_not_in_process(origin, padded=sharded.model.padded)
    if kind == "inprocess" and why:
        raise ConfigError(
            f"rollout.engine: inprocess cannot decode {origin.family.name}: {why}. Use rollout.engine: transformers."
        )
    if samples_in_process(sharded, kind):
        # On the CPU calling an operation costs little beside it, and a room of tokens is more than the tokens in it.
        replays = graphs == "auto" and device.type == "cuda" and not tells_experts
        return InProcessEngine(
            origin,
            device,
            dtype,
            stops,
            rows=rows,
            tells_experts=tells_experts,
            float32_head=sharded.setting.config.model.head.dtype == "float32",
            recorder=CudaRecorder(device) if replays else None,
            compiler="inductor" if sharded.setting.config.compiles_blocks("cuda") else None,
        )
    if kind == "auto" and sharded.setting.world.is_first:
        print(f"rollouts by transformers' generate, which is slower, for {origin.family.name}: {why}", flush=True)
    fill = pad_token(tokenizer)
    return TransformersEngine(origin, device, dtype, stops, fill, rows=rows, tells_experts=tells_experts)


def stops_of(sharded: ShardedModel) -> Stops:
    """Return what ends a completion, whatever samples it."""
    origin, tokenizer = sharded.origin, sharded.origin.tokenizer
    # Behind an image token that is not an image's, training and sampling would read different things: it ends the text.
    return Stops(
        frozenset([*stop_tokens(origin), *origin.family.image_marks]),
        lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
    )


def samples_in_process(sharded: ShardedModel, kind: LocalKind) -> bool:
    """Return whether it is our own decoding that an engine of this kind samples by."""
    return kind != "transformers" and not why_not_in_process(sharded.origin, padded=sharded.model.padded)


def why_no_videos(sharded: ShardedModel, section: EngineSection) -> str:
    """Return why what this engine completes may have no videos; "" where it may."""
    if not isinstance(section, LocalEngineConfig):
        return "servers are sent images and no videos" if isinstance(section, VLLMEngineConfig) else ""
    kind = section.kind
    if samples_in_process(sharded, kind):
        return ""
    return "transformers' generate, which samples here, would place its frames as if they were images"


def stop_tokens(origin: Blueprint) -> list[int]:
    """Return every token that ends a completion: the tokenizer's, and those that the model's own settings name."""
    configured = getattr(origin.skeleton.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [origin.tokenizer.eos_token_id, *several] if token is not None})


def pad_token(tokenizer: Any) -> int:
    """Return the padding token; any token will do, since padding is not read."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


_GIB = 2**30


def shared_by_ranks(sharded: ShardedModel) -> int:
    """Return how many bytes of weights all ranks sample over together; all of them call this together."""
    return common_bytes(sharded.model, sharded.setting.ranks, getattr(torch, sharded.plan.compute_dtype))


def check_copy_fits(sharded: ShardedModel, budget_gib: float | None, common: int, *, in_process: bool) -> None:
    """Refuse rollouts that would run out of memory in step 1; else say what they take.

    Args:
        sharded: The policy, on its device already.
        budget_gib: Most that sampling may take; None for what is free now.
        common: From `shared_by_ranks`.
        in_process: Whether our own decoding samples, and not transformers' `generate`.

    Raises:
        ConfigError: Sampling takes more.
    """
    dtype = sharded.plan.compute_dtype
    copied = copy_bytes(sharded, common)
    laid_out = layout_bytes(sharded) if in_process else 0
    needed = copied + laid_out
    world, breakdown = (
        sharded.setting.world,
        _memory_breakdown(copied, -(-common // sharded.setting.ranks.size), laid_out, dtype),
    )
    budget = free_bytes(world) if budget_gib is None else int(budget_gib * _GIB)
    if needed > budget:
        has_limit = budget_gib is not None
        limit = f"may take {budget_gib:g} GiB (rollout.copy_gib)" if has_limit else f"has {size_words(budget)} free"
        advice = "" if dtype == "bfloat16" else ", set parallel.compute_dtype: bfloat16"
        room = "devices with more memory" if world.device.type == "cuda" else "fewer ranks on a machine"
        raise ConfigError(
            f"rollout: sampling takes {size_words(needed)} on every rank, {breakdown}, and rank "
            f"{world.rank} {limit}. Use a smaller model{advice}, or use {room}."
        )
    if world.is_first:
        print(f"rollouts: {breakdown}, on every rank", flush=True)


def copy_bytes(sharded: ShardedModel, common: int) -> int:
    """Return what a rank's copy takes besides the policy itself, of which sampling reads what has the right dtype.

    Of the `common` bytes that all ranks share, a rank has its part.
    """
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    plan = sharded.plan
    unsharded = not plan.sharded or (plan.shard == 1 and not plan.cpu_offload)
    if unsharded and sharded.setting.config.model.lora is None:
        numbers = sum(value.numel() for value in sharded.model.parameters() if value.dtype != dtype)
    else:
        numbers = sum(value.numel() for value in sharded.origin.skeleton.parameters())
    return int(numbers) * dtype.itemsize - common + -(-common // sharded.setting.ranks.size)


def layout_bytes(sharded: ShardedModel) -> int:
    """Return what decoding takes on the CPU for matrices that it lays out anew while the first ones stay."""
    if sharded.setting.world.device.type != "cpu":
        return 0
    layers = [layer for layer in sharded.origin.skeleton.modules() if type(layer) is nn.Linear]
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    return sum(int(layer.weight.numel()) for layer in layers) * dtype.itemsize


def free_bytes(world: World) -> int:
    """Return the memory that is free on this rank's device; of a host's, its share among the ranks there."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return int(torch.cuda.mem_get_info(world.device)[0]) + cached
    return free_host_bytes(world)


def free_host_bytes(world: World) -> int:
    """Return this rank's share of the memory that is free on its machine."""
    return int(psutil.virtual_memory().available) // (world.local_size or 1)


def _memory_breakdown(copied: int, shared: int, laid_out: int, dtype: str) -> str:
    """Say what sampling takes; `shared` of what is copied is this rank's part of what all ranks read."""
    whose = {
        "a part of the copy of the weights that all ranks share": shared,
        f"a copy of the {'other ' if shared else ''}weights": copied - shared,
    }
    breakdown = [f"{name}, {size_words(count)} in {dtype}" for name, count in whose.items() if count]
    laid = [f"{size_words(laid_out)} of matrices laid out for decoding"] if laid_out else []
    return ", and ".join([*(breakdown or ["the policy's own weights"]), *laid])


def layout_of(sharded: ShardedModel, images: ImageSide | str = "") -> Layout:
    """Return how this model's batches are packed."""
    text = sharded.origin.skeleton.config.get_text_config()
    attention = layers_in(sharded.origin.skeleton) * text.hidden_size / max(1, sharded.plan.parameters)
    dtype = torch.float64 if sharded.setting.config.model.dtype == "float64" else torch.float32
    several = sharded.plan.sharded and sharded.setting.ranks.size > 1
    stand_in = images.stand_in if several and isinstance(images, ImageSide) else {}
    angles = angles_by_length([sharded.origin.skeleton.config])
    padded, filler = sharded.model.padded, pad_token(sharded.origin.tokenizer)
    context = sharded.setting.config.parallel.context
    return Layout(padded, filler, dtype, attention, angles_of=angles, stand_in=stand_in, context=context)
