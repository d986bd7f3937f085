"""Build a run: every check that can fail before step 1 fails here, on all ranks alike, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.config.runs import SFTConfig, TrainingConfig, planned_steps
from holdfast.data.assembly import Layout
from holdfast.data.stream import BatchStream
from holdfast.data.vision import FAMILIES, ImageSide
from holdfast.errors import ConfigError, PlanError
from holdfast.metrics.throughput import ModelCost, peak_flops
from holdfast.models.attention import upstream_attention
from holdfast.models.build import Blueprint, blueprint, set_storage
from holdfast.models.family import blocks_of
from holdfast.models.names import canonical_name, named_parameters, tied_names
from holdfast.models.policy import PolicyModel
from holdfast.models.selfcheck import check_forward
from holdfast.models.vision import image_side, towers_of
from holdfast.objectives.base import Objective
from holdfast.optim.build import build_optimizer
from holdfast.parallel.apply import apply_plan
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.materialise import materialise, sharded_parameters
from holdfast.parallel.mesh import World, build_mesh
from holdfast.parallel.plan import ParameterInfo, ShardPlan, plan_shards
from holdfast.training.directory import check_writable, run_directory
from holdfast.training.engines import pad_token
from holdfast.training.identity import identity
from holdfast.training.losses import supervised_objective
from holdfast.training.observe import Observer, load_function
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Evaluation, Run
from holdfast.training.sources import (
    OpenedData,
    check_batch,
    evaluation_sets,
    open_data,
    refuse_completions_of_images,
    row_tokeniser,
    training_stream,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """Objects that a Python caller brings instead of naming them in the configuration."""

    rows: Any = None
    model: Any = None
    tokenizer: Any = None
    objective: Objective | None = None
    observers: tuple[Callable[..., object], ...] = ()
    rewards: tuple[Callable[..., object], ...] = ()
    """Reward functions, called in this process."""


@dataclass(frozen=True)
class Started:
    """What every kind of run begins with."""

    exchange: ProcessExchange
    data: OpenedData
    observers: tuple[Observer, ...]


def begin(config: TrainingConfig, base: Path, world: World, live: Live) -> Started:
    """Check the directory, load observers and open the rows.

    Raises:
        UserError: The same on all ranks; nothing has been written.
    """
    exchange = open_exchange(config)
    directory = run_directory(config)
    with exchange.together():
        if world.is_first:
            check_writable(directory)
    observers = together(exchange, lambda: _observers(config, base, live))
    data = first_rank_first(exchange, lambda: open_data(config, base, live.rows))
    together(exchange, lambda: check_batch(config, data, world.size))
    return Started(exchange, data, observers)


def build_run(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Run:
    """Return a run that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    exchange, data = started.exchange, started.data
    measured = _measured(config, base, world, exchange, live, data)
    images = image_side_of(config, measured.origin)
    tokenise = row_tokeniser(measured.origin.tokenizer, config.data, base, data.formats, images)
    layout = layout_of(measured, images)
    stream = together(exchange, lambda: training_stream(config, data, tokenise, exchange, layout, base))
    return Run(**vars(measured), **parts_of_run(config, base, measured, started, stream))


def parts_of_run(
    config: TrainingConfig, base: Path, measured: Evaluation, started: Started, stream: BatchStream[Any, Any]
) -> dict[str, Any]:
    """Return what training needs besides a model: the fields of `Run` that `Evaluation` has not.

    Raises:
        UserError: The schedule needs an end that nobody knows.
    """
    exchange, world = started.exchange, measured.world
    total = planned_steps(config, stream.steps_per_epoch())
    together(exchange, lambda: _check_end(config, total))
    seed_rank(config.seed, world.rank, deterministic=config.determinism)
    return {
        "optimizer": build_optimizer(config.optim, sharded_parameters(measured.policy)),
        "stream": stream,
        "total_steps": total,
        "cost": _cost(measured),
        "peak_flops": _peak_flops(config, world),
        "source_names": tuple(source.name for source in started.data.training),
        "observers": started.observers,
        "identity": together(exchange, lambda: identity(config, base, stream, measured.origin)),
    }


def build_evaluation(config: SFTConfig, base: Path, world: World) -> Evaluation:
    """Return a model and its evaluation sets; training rows are opened only if a validation split is cut from them.

    Raises:
        UserError: As `build_run`.
    """
    exchange = open_exchange(config)
    needs_training_rows = config.data.validation_split > 0
    data = first_rank_first(exchange, lambda: open_data(config, base, training=needs_training_rows))
    return _measured(config, base, world, exchange, Live(), data)


def _measured(
    config: SFTConfig, base: Path, world: World, exchange: ProcessExchange, live: Live, data: OpenedData
) -> Evaluation:
    objective = live.objective or together(exchange, lambda: supervised_objective(config.objective, base))
    parts = build_model(config, base, world, exchange, live, objective)
    images = image_side_of(config, parts.origin)
    tokenise = together(
        exchange, lambda: row_tokeniser(parts.origin.tokenizer, config.data, base, data.formats, images)
    )
    sets = evaluation_sets(config, data, tokenise, exchange, layout_of(parts, images))
    if isinstance(images, ImageSide):
        together(exchange, lambda: refuse_completions_of_images(config, sets))
    return replace(parts, evaluation_sets=sets)


def build_model(  # noqa: PLR0913 - the borders of a run
    config: TrainingConfig, base: Path, world: World, exchange: ProcessExchange, live: Live, objective: Objective
) -> Evaluation:
    """Return the policy on its ranks, without anything to measure it on."""
    origin = first_rank_first(
        exchange, lambda: blueprint(config.model, base, seed=config.seed, live=live.model, tokenizer=live.tokenizer)
    )
    policy, plan = build_policy(config, origin, world, exchange)
    return Evaluation(
        config=config,
        world=world,
        exchange=exchange,
        origin=origin,
        plan=plan,
        policy=policy,
        objective=objective,
        evaluation_sets=(),
        directory=run_directory(config),
    )


def build_policy(
    config: TrainingConfig, origin: Blueprint, world: World, exchange: ProcessExchange, *, trained: bool = True
) -> tuple[PolicyModel, ShardPlan]:
    """Plan, shard, fill and check the policy; one that is not `trained` is stored like it, and all of it is frozen.

    Raises:
        UserError: The plan cannot work, a tensor is missing, or the forward pass is not the model's own.
    """
    mesh = together(exchange, lambda: build_mesh(config.parallel, world))
    images = together(exchange, lambda: image_side_of(config, origin))
    storage = getattr(torch, config.model.dtype)
    frozen = storage if config.model.frozen_dtype == "same" else getattr(torch, config.model.frozen_dtype)
    set_storage(origin.model, storage, frozen)
    if not trained:
        origin.model.requires_grad_(False)  # noqa: FBT003 - torch's own form
    if storage is torch.float64:  # torch's grouped products of experts exist for 32 and 16 bits only
        origin.model.set_experts_implementation("eager")
    packed = origin.packed and config.data.packing != "none"
    if not packed and origin.packed:
        eager = config.model.attention == "eager"
        origin.model.set_attn_implementation("eager" if eager else upstream_attention(origin.model))
    head = config.model.head
    spec = origin.family.head_spec(float32_product=head.dtype == "float32", chunk_tokens=head.chunk_tokens)
    spec = replace(spec, compiled=config.parallel.compile != "off")
    policy = PolicyModel(origin.model, origin.family, spec, padded=not packed)
    plan = together(exchange, lambda: make_plan(config, policy, mesh.size(1), world.device.type))
    apply_plan(policy, plan, mesh)
    with exchange.together():
        materialise(policy, origin.source, origin.buffers, world.device, offload=plan.cpu_offload)
    result, note = together(
        exchange,
        lambda: check_forward(
            policy,
            may_fall_back=config.model.attention == "auto",
            compute_dtype=getattr(torch, plan.compute_dtype),
            device=world.device,
            images=images if isinstance(images, ImageSide) else None,
        ),
    )
    if world.is_first:
        for line in (*plan.describe().splitlines(), *origin.notes, note):
            if line:
                print(line, flush=True)
        print(f"forward check: log-probabilities agree with transformers to {result.difference:.1e}", flush=True)
    return policy, plan


def image_side_of(config: TrainingConfig, origin: Blueprint) -> ImageSide | str:
    """Return what turns the images of rows into tokens; or why there is nothing that does.

    Raises:
        ModelError: Image processor, tokenizer and model do not belong together.
    """
    vision = FAMILIES.get(origin.family.name)
    if vision is not None and not vision.packs and config.data.packing != "none":
        return f"{origin.family.name} attends within an image in both directions, and packs do not; packing: none does"
    return image_side(
        origin.image_processor,
        origin.tokenizer,
        origin.original_config,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
    )


def make_plan(config: TrainingConfig, policy: PolicyModel, shard: int, device: str) -> ShardPlan:
    """Plan the shards of a policy on the meta device."""
    ties = tied_names(policy)
    parameters = [
        ParameterInfo(
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            value.requires_grad,
            ties.get(name, ()),
        )
        for name, value in named_parameters(policy).items()
    ]
    modules = [canonical_name(name) for name, _ in policy.language_model.named_modules()]
    blocks = blocks_of(policy.language_model)
    if not blocks and not config.parallel.units:
        raise PlanError(f"{policy.family.name} has no list of blocks. Name the units in parallel.units.")
    towers = towers_of(policy.language_model)
    return plan_shards(parameters, modules, blocks, config.parallel, shard=shard, device=device, towers=towers)


def open_exchange(config: TrainingConfig) -> ProcessExchange:
    """Return the ranks of a run as a group that exchanges objects."""
    return ProcessExchange(timedelta(minutes=config.launch.timeout_minutes))


def together(exchange: ProcessExchange, build: Callable[[], T]) -> T:
    """Run on every rank; if it fails on one, raise there and everywhere."""
    result: list[T] = []
    with exchange.together():
        result.append(build())
    return result[0]


def first_rank_first(exchange: ProcessExchange, build: Callable[[], T]) -> T:
    """Run on rank 0 before the others, so that downloads and caches are made once."""
    result: list[T] = []
    for turn in (True, False):
        with exchange.together():
            if (exchange.rank == 0) is turn:
                result.append(build())
    return result[0]


def _observers(config: TrainingConfig, base: Path, live: Live) -> tuple[Observer, ...]:
    named = [Observer(path, load_function(path, base, "observers")) for path in config.observers]
    given = (
        Observer(f"{getattr(function, '__name__', 'observer')} ({number})", function)
        for number, function in enumerate(live.observers)
    )
    return (*named, *given)


def layout_of(parts: Evaluation, images: ImageSide | str = "") -> Layout:
    """Return how this model's batches are packed."""
    text = parts.origin.skeleton.config.get_text_config()
    attention = text.num_hidden_layers * text.hidden_size / max(1, parts.plan.parameters)
    dtype = torch.float64 if parts.config.model.dtype == "float64" else torch.float32
    several = parts.plan.sharded and parts.exchange.size > 1
    stand_in = images.stand_in if several and isinstance(images, ImageSide) else {}
    return Layout(parts.policy.padded, pad_token(parts.origin.tokenizer), dtype, attention, stand_in=stand_in)


def _check_end(config: TrainingConfig, total: int | None) -> None:
    schedule = config.optim.schedule
    if total is None and (schedule.kind != "constant" or schedule.warmup_ratio > 0):
        raise ConfigError(
            f"optim.schedule {schedule.kind} needs to know the last step, and the data's length is not known before it "
            "is read. Set steps, or use schedule: {kind: constant}."
        )


def _cost(parts: Evaluation) -> ModelCost:
    text, plan = parts.origin.skeleton.config.get_text_config(), parts.plan
    return ModelCost(plan.trainable, plan.parameters - plan.trainable, text.num_hidden_layers, text.hidden_size)


def _peak_flops(config: TrainingConfig, world: World) -> float | None:
    if config.metrics.peak_flops is not None:
        return config.metrics.peak_flops
    return peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
