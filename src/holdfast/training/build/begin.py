"""Build a run: every check that can fail before step 1 fails here, on all ranks alike, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.config.verbs.training import SFTConfig, TrainingConfig, planned_steps
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.stream import BatchStream
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.metrics.sink import check_sinks
from holdfast.metrics.throughput import peak_flops
from holdfast.models.build.model import Blueprint, blueprint
from holdfast.models.layers.rotary import angles_by_length
from holdfast.objectives.base import Objective
from holdfast.optim.unfreezing import Unfreezing
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.build.losses import supervised_objective
from holdfast.training.build.model import build_policy, check_positions, image_side_of
from holdfast.training.build.optimizers import averages_of, optimizer_of
from holdfast.training.build.rows import (
    OpenedData,
    SetReading,
    check_batch,
    evaluation_sets,
    evaluation_tokenisers,
    open_data,
    refuse_completions_with_images,
    row_filter,
    row_tokeniser,
    training_stream,
)
from holdfast.training.directory import check_writable, run_directory
from holdfast.training.engines import pad_token
from holdfast.training.fingerprints import Identity, identity, image_marks, is_marked, mark_base_of_adapters, mark_once
from holdfast.training.observe import Observer, load_function
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Evaluation, Run, cost_of
from holdfast.training.saving.parents import notes_of_exports


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

    ranks: RankGroup
    data: OpenedData
    observers: tuple[Observer, ...]


def begin(config: TrainingConfig, base: Path, world: World, live: Live) -> Started:
    """Check the directory, load observers and open the rows.

    Raises:
        UserError: A check failed; the same on all ranks, and nothing has been written.
    """
    ranks = RankGroup(config.launch.timeout_minutes)
    directory = run_directory(config)
    with ranks.together():
        if world.is_first:
            check_writable(directory)
    ranks.on_all_ranks(lambda: check_sinks(config.metrics.sinks))
    observers = ranks.on_all_ranks(lambda: _observers(config, base, live))
    data = ranks.first_rank_first(lambda: open_data(config, base, live.rows))
    ranks.on_all_ranks(lambda: check_batch(config, data, world.size))
    return Started(ranks, data, observers)


def build_run(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Run:
    """Return a run that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    ranks, data = started.ranks, started.data
    measured = _measured(config, base, world, ranks, live, data)
    images = image_side_of(config, measured.origin)
    tokenizer = measured.origin.tokenizer
    tokenise = ranks.on_all_ranks(lambda: row_tokeniser(tokenizer, config.data, base, data.formats, images))
    layout = layout_of(measured, images)
    stream = ranks.on_all_ranks(lambda: training_stream(config, data, tokenise, ranks, layout, base))
    return Run(**vars(measured), **parts_of_run(config, base, measured, started, stream))


def parts_of_run(
    config: TrainingConfig, base: Path, measured: Evaluation, started: Started, stream: BatchStream[Any, Any]
) -> dict[str, Any]:
    """Return what training needs besides a model: the fields of `Run` that `Evaluation` has not.

    Raises:
        UserError: The schedule needs an end that nobody knows.
    """
    ranks, world = started.ranks, measured.world
    if _needs_its_end(config):
        stream.count_rows(tokens=measured.origin.image_processor is None)  # opening every image may take hours
    total = planned_steps(config, stream.steps_per_epoch())
    ranks.on_all_ranks(lambda: _check_end(config, total))
    ranks.on_all_ranks(lambda: _check_stages(measured, total))
    seed_rank(config.seed, world.rank, deterministic=config.determinism)
    parameters = sharded_parameters(measured.policy)
    optimizer = optimizer_of(config.optim, base, parameters, ranks, measured.policy)
    averages = averages_of(config.optim, parameters)
    return {
        "optimizer": optimizer,
        "averages": averages,
        "unfreezing": Unfreezing(measured.origin.stages, optimizer, parameters, averages),
        "stream": stream,
        "total_steps": total,
        "cost": cost_of(measured.policy, measured.origin),
        "peak_flops": _peak_flops(config, world),
        "source_names": tuple(source.name for source in started.data.training),
        "observers": started.observers,
        "identity": _identity(config, base, ranks, stream, measured.origin),
    }


def _identity(
    config: TrainingConfig, base: Path, ranks: RankGroup, stream: BatchStream[Any, Any], origin: Blueprint
) -> Identity:
    """Return what a resumed run must find unchanged; images are read by rank 0 alone, for all."""
    marks = ranks.on_all_ranks(lambda: image_marks(config, base, stream, origin) if ranks.rank == 0 else {})
    marks = ranks.agree(marks)
    return ranks.on_all_ranks(lambda: identity(config, base, stream, origin, marks))


def build_evaluation(config: SFTConfig, base: Path, world: World) -> Evaluation:
    """Return a model and its evaluation sets; training rows are opened only if a validation split is cut from them.

    Raises:
        UserError: As `build_run`.
    """
    ranks = RankGroup(config.launch.timeout_minutes)
    needs_training_rows = config.data.validation_split > 0
    data = ranks.first_rank_first(lambda: open_data(config, base, training=needs_training_rows))
    return _measured(config, base, world, ranks, Live(), data)


def _measured(
    config: SFTConfig, base: Path, world: World, ranks: RankGroup, live: Live, data: OpenedData
) -> Evaluation:
    objective = live.objective or ranks.on_all_ranks(lambda: supervised_objective(config.objective, base))
    parts = build_model(config, base, world, ranks, live, objective)
    images = image_side_of(config, parts.origin)
    tokenizer = parts.origin.tokenizer
    reading = ranks.on_all_ranks(
        lambda: SetReading(evaluation_tokenisers(tokenizer, config.data, base, data, images), row_filter(config, base)),
    )
    sets = evaluation_sets(config, data, reading, ranks, layout_of(parts, images))
    ranks.on_all_ranks(lambda: refuse_completions_with_images(config, sets, images))
    return replace(parts, evaluation_sets=sets)


def build_model(  # noqa: PLR0913 - the borders of a run
    config: TrainingConfig, base: Path, world: World, ranks: RankGroup, live: Live, objective: Objective
) -> Evaluation:
    """Return the policy on its ranks, without anything to measure it on."""
    if live.model is None:
        mark_base_of_adapters(config, base, ranks)
    origin = ranks.first_rank_first(
        lambda: blueprint(
            config.model, base, seed=config.seed, live=live.model, tokenizer=live.tokenizer, scorer=config.scores
        ),
    )
    if is_marked(config):
        mark_once(origin.directory, ranks)
    exports = ranks.first_rank_first(lambda: notes_of_exports(config, origin.directory, base))
    note = ranks.on_all_ranks(lambda: check_positions(config, origin))
    origin = replace(origin, notes=(*origin.notes, *exports, *([note] if note else [])))
    policy, plan = build_policy(config, origin, world, ranks)
    return Evaluation(
        config=config,
        world=world,
        ranks=ranks,
        origin=origin,
        plan=plan,
        policy=policy,
        objective=objective,
        evaluation_sets=(),
        directory=run_directory(config),
    )


def _observers(config: TrainingConfig, base: Path, live: Live) -> tuple[Observer, ...]:
    named = [Observer(path, load_function(path, base, "observers")) for path in config.observers]
    live_observers = (
        Observer(f"{getattr(function, '__name__', 'observer')} ({number})", function)
        for number, function in enumerate(live.observers)
    )
    return (*named, *live_observers)


def layout_of(parts: Evaluation, images: ImageSide | str = "") -> Layout:
    """Return how this model's batches are packed."""
    text = parts.origin.skeleton.config.get_text_config()
    attention = text.num_hidden_layers * text.hidden_size / max(1, parts.plan.parameters)
    dtype = torch.float64 if parts.config.model.dtype == "float64" else torch.float32
    several = parts.plan.sharded and parts.ranks.size > 1
    stand_in = images.stand_in if several and isinstance(images, ImageSide) else {}
    angles = angles_by_length([parts.origin.skeleton.config])
    padded, filler = parts.policy.padded, pad_token(parts.origin.tokenizer)
    return Layout(padded, filler, dtype, attention, angles_of=angles, stand_in=stand_in)


def _needs_its_end(config: TrainingConfig) -> bool:
    """Whether the number of steps follows from the rows, and something else from that number."""
    epochs = config.epochs
    if epochs is None or config.dry_run:
        return False
    return bool(epochs % 1) or config.optim.schedule.needs_last_step


def _check_end(config: TrainingConfig, total: int | None) -> None:
    schedule = config.optim.schedule
    if total is None and schedule.needs_last_step:
        raise ConfigError(
            f"optim.schedule {schedule.kind} needs to know the last step, and the data's length is not known before it "
            "is read. Set steps, or use schedule: {kind: constant}."
        )


def _check_stages(parts: Evaluation, total: int | None) -> None:
    late = [stage for stage in parts.origin.stages if total is not None and stage.at_step >= total]
    if late and not parts.config.dry_run:
        raise ConfigError(
            f"model.unfreeze: {late[0].at_step} steps come before what is unfrozen then, and the run makes {total}, so "
            "nothing would train it. Lower at_step, or train longer."
        )


def _peak_flops(config: TrainingConfig, world: World) -> float | None:
    if config.metrics.peak_flops is not None:
        return config.metrics.peak_flops
    return peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
