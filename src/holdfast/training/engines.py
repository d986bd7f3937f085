"""Choose the engine that samples from a policy, and check that a rank has memory for unsharded weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from holdfast.models.check.shrink import layers_in
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.copies import copies_of
from holdfast.parallel.stream import drained, full_tensor, held_tensors, live_tensors
from holdfast.rollout.engine import RolloutEngine
from holdfast.rollout.local.generation import TransformersEngine
from holdfast.rollout.local.graphs import CudaRecorder
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.local.recurrent import agree_on_decoding, why_not_in_process
from holdfast.rollout.local.replica import ReplicaEngine
from holdfast.rollout.sampling import Stops
from holdfast.training.observe import load_function
from holdfast.training.run import Model


class PublishedEngine(ABC):
    """An engine in other processes, to which the ranks push their shards directly."""

    @abstractmethod
    def publish(self, model: Model) -> None:
        """Push the present weights, and prove that they arrived; all ranks call this together."""

    def step_metrics(self) -> dict[str, float]:
        """Return what the engine measured since the last call; all ranks call this together, and get the same."""
        return {}


def open_engine(
    model: Model,
    rollout: EngineConfig,
) -> RolloutEngine:
    """Return the engine of a run's rollouts, if completions end; `deal_memory` gives it its room.

    All ranks call this together, and all of them raise what any of them raises.

    Args:
        model: The policy.
        rollout: How it is sampled.

    Raises:
        ConfigError: Completions do not end, or the engine cannot decode this model.
    """
    section, run = rollout.engine, model.run
    with run.ranks.together():
        if not stop_tokens(model.blueprint) and not rollout.stop:
            raise ConfigError(
                "Nothing ends a completion: the tokenizer has no end-of-sequence token, and rollout.stop names no "
                "text. Give the tokenizer an eos_token, or set rollout.stop."
            )
        if isinstance(section, VLLMEngineConfig) and model.plan.compute_dtype not in {"float32", "bfloat16"}:
            raise ConfigError(
                f"rollout.engine: vllm computes in float32 or bfloat16, and this run in {model.plan.compute_dtype}. "
                "Set parallel.compute_dtype."
            )
    if isinstance(section, VLLMEngineConfig):  # its servers are asked by all ranks together
        served: RolloutEngine = registry.load(registry.ENGINES[section.kind])(model, section, stops_of(model))
        return served
    if isinstance(section, LocalEngineConfig):
        agree_on_decoding(model.blueprint, run.ranks.gather)
    with run.ranks.together():
        match section:
            case LocalEngineConfig():
                engine = build_engine(model, section.kind, rollout.rows, rollout.graphs)
            case RecordedEngineConfig():
                engine = registry.load(registry.ENGINES[section.kind])(run.base / section.path)
            case UserEngineConfig():
                engine = _user_engine(section, run.base)
    return engine


_MEMBERS = ("update_weights", "submit", "collect", "sleep", "close")


def _user_engine(section: UserEngineConfig, base: Path) -> RolloutEngine:
    engine = load_function(section.path, base, "rollout.engine.path")(**section.kwargs)
    missing = [name for name in _MEMBERS if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(
            f"rollout.engine.path: what {section.path} returns has no {', '.join(missing)}; an engine has the members "
            "of holdfast.rollout.engine.RolloutEngine."
        )
    rollout_engine: RolloutEngine = engine
    return rollout_engine


def give_weights(engine: RolloutEngine, model: Model) -> None:
    """Let an engine take over the policy's present weights; all ranks call this together."""
    if isinstance(engine, PublishedEngine):
        engine.publish(model)
        return
    tensors = _weights_of(model) if isinstance(engine, ReplicaEngine) else live_tensors(model.module)
    with model.run.ranks.together(), drained(tensors):
        engine.update_weights(tensors, model.state.updates)


def _weights_of(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield what `live_tensors` does, but the copies that a single rank's passes read in the place of parameters."""
    copies = copies_of(model.module)
    present = {} if copies is None else copies.of_parameters()
    for name, holding in held_tensors(model.module).items():
        yield name, present[id(holding)] if id(holding) in present else full_tensor(holding)


def build_engine(
    model: Model,
    kind: LocalKind = "auto",
    rows: int = 512,
    graphs: GraphsKind = "off",
) -> RolloutEngine:
    """Return an engine without weights: our own decoding where the model's attention allows it.

    Args:
        model: The policy.
        kind: Which engine.
        rows: Most completions decoded together.
        graphs: Whether our own decoding replays recorded steps on CUDA; `off` where no key of a run says.

    Raises:
        ConfigError: The engine that was asked for cannot decode this model.
    """
    origin, tokenizer, device = model.blueprint, model.blueprint.tokenizer, model.run.world.device
    stops, dtype = stops_of(model), getattr(torch, model.plan.compute_dtype)
    why = why_not_in_process(origin, padded=model.module.padded)
    if kind == "inprocess" and why:
        raise ConfigError(
            f"rollout.engine: inprocess cannot decode {origin.family.name}: {why}. Use rollout.engine: transformers."
        )
    if samples_in_process(model, kind):
        # On the CPU calling an operation costs little beside it, and a room of tokens is more than the tokens in it.
        replays = graphs == "auto" and device.type == "cuda"
        return InProcessEngine(
            origin,
            device,
            dtype,
            stops,
            rows=rows,
            float32_head=model.run.config.model.head.dtype == "float32",
            recorder=CudaRecorder(device) if replays else None,
            compiler="inductor" if model.run.config.compiles_blocks("cuda") else None,
            measured=partial(model.run.phase, "recording"),
        )
    if kind == "auto" and model.run.world.is_first:
        print(f"rollouts by transformers' generate, which is slower, for {origin.family.name}: {why}", flush=True)
    fill = pad_token(tokenizer)
    return TransformersEngine(origin, device, dtype, stops, fill, rows=rows)


def stops_of(model: Model) -> Stops:
    """Return what ends a completion, whatever samples it."""
    origin, tokenizer = model.blueprint, model.blueprint.tokenizer
    # Behind an image token that is not an image's, training and sampling would read different things: it ends the text.
    return Stops(
        frozenset([*stop_tokens(origin), *origin.family.image_marks]),
        lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
    )


def samples_in_process(model: Model, kind: LocalKind) -> bool:
    """Return whether it is our own decoding that an engine of this kind samples by."""
    return kind != "transformers" and not why_not_in_process(model.blueprint, padded=model.module.padded)


def why_no_videos(model: Model, section: EngineSection) -> str:
    """Return why what this engine completes may have no videos; "" where it may."""
    if not isinstance(section, LocalEngineConfig):
        return "servers are sent images and no videos" if isinstance(section, VLLMEngineConfig) else ""
    kind = section.kind
    if samples_in_process(model, kind):
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


def layout_of(model: Model, images: ImageSide | str = "") -> Layout:
    """Return how this model's batches are packed."""
    text = model.blueprint.skeleton.config.get_text_config()
    attention = layers_in(model.blueprint.skeleton) * text.hidden_size / max(1, model.plan.parameters)
    dtype = torch.float64 if model.run.config.model.dtype == "float64" else torch.float32
    several = model.plan.sharded and model.run.ranks.size > 1
    stand_in = images.stand_in if several and isinstance(images, ImageSide) else {}
    padded, filler = model.module.padded, pad_token(model.blueprint.tokenizer)
    context = model.run.config.parallel.context
    return Layout(padded, filler, dtype, attention, stand_in=stand_in, context=context)


def settle_forms(model: Model, engine: InProcessEngine) -> None:
    """Choose the optional forms of an engine that has weights, once; all ranks call this together.

    Args:
        model: The policy.
        engine: What samples from it.
    """
    run = model.run
    # An engine of one evaluation has no part of the memory yet, and finds out for itself what it needs to know.
    if engine.block_limit is None:
        return
    for standing in engine.choose_forms(model.forms):
        # A form that is used where nothing else could be expected is no news.
        if run.world.is_first and (standing.reason or standing.speedups):
            print(standing, flush=True)
