"""Build a run. Every check that can fail before step 1 is made here, on all ranks, before any file is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.config.verbs.training import SFTConfig, TrainingConfig, end_of_both, planned_steps
from holdfast.data.batches.ahead import BatchesAhead, ReadAhead, StreamAhead
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.batches.packing import pinned
from holdfast.data.batches.stream import BatchStream, PromptStream
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.models.setup.model import Blueprint, blueprint, cost_of
from holdfast.objectives.base import Objective
from holdfast.optim.host_steps import HostSteps
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.directory import check_verb, check_writable
from holdfast.training.engines import layout_of
from holdfast.training.fingerprints import (
    fingerprint_base_of_adapters,
    fingerprint_once,
    identity,
    image_fingerprints,
    is_fingerprinted,
)
from holdfast.training.observe import Observer, load_function
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Evaluation, EvaluationSet, Run, Setting, ShardedModel, Trained
from holdfast.training.saving.parents import notes_of_exports
from holdfast.training.setup.first_rows import check_first_rows, check_same_rows
from holdfast.training.setup.frozen import settle_frozen
from holdfast.training.setup.losses import supervised_objective
from holdfast.training.setup.model import build_policy, check_positions, image_side_of
from holdfast.training.setup.optimizers import averages_of, optimizer_of
from holdfast.training.setup.rows import (
    OpenedData,
    SetReading,
    check_batch,
    evaluation_tokenisers,
    open_data,
    opened_sets,
    refuse_completions_with_images,
    row_filter,
    row_tokeniser,
    training_stream,
)
from holdfast.types import Example


@dataclass(frozen=True)
class Live:
    """Objects that a Python caller brings instead of naming them in the configuration."""

    rows: Any = None
    model: Any = None
    tokenizer: Any = None
    objective: Objective | None = None
    observers: Sequence[Callable[..., object]] = ()
    rewards: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Reward functions by name, called in this process."""
    environment: Any = None
    """What the section `environment` names by its import path."""


@dataclass(frozen=True)
class RunSetup:
    """The parts that every kind of run is built from."""

    setting: Setting
    live: Live
    data: OpenedData
    observers: tuple[Observer, ...]


def begin(setting: Setting, live: Live) -> RunSetup:
    """Check the directory, load observers and open the rows.

    Raises:
        UserError: A check failed; the same on all ranks, and nothing has been written.
    """
    config, ranks = setting.config, setting.ranks
    ranks.on_first_rank(lambda: check_writable(setting.directory))
    if "objective" not in config.checkpoint.resume.changed:
        ranks.on_first_rank(lambda: check_verb(setting.directory, config.verb))
    settle_frozen(setting, live=live.model is not None)
    if config.metrics.sinks:
        ranks.on_all_ranks(lambda: registry.load(registry.TRACKER_CHECK)(config.metrics.sinks, setting.base))
    observers = ranks.on_all_ranks(lambda: _observers(setting, live))
    data = ranks.first_rank_first(lambda: open_data(setting, live.rows))
    check_same_rows(setting, data, live=live.rows is not None)
    ranks.on_all_ranks(lambda: check_batch(config, data, setting.world.size))
    return RunSetup(setting, live, data, observers)


def begin_evaluation(setting: Setting) -> RunSetup:
    """Open the rows; those of training only if a validation split is cut from them.

    Raises:
        UserError: As `begin`.
    """
    setting.trains = False
    settle_frozen(setting, live=False, trains=False)
    training = setting.config.data.validation_split > 0
    data = setting.ranks.first_rank_first(lambda: open_data(setting, training=training))
    check_same_rows(setting, data)
    return RunSetup(setting, Live(), data, ())


def build_run(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Run:
    """Return a run that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    setting = Setting.of(config, base, world)
    setup = begin(setting, live or Live())
    data, evaluation = setup.data, _evaluation(config, setup)
    sharded = evaluation.sharded
    images = image_side_of(config, sharded.origin)
    tokenise = setting.ranks.on_all_ranks(
        lambda: row_tokeniser(setting, sharded.origin.tokenizer, data.formats, images),
    )
    layout = layout_of(sharded, images)
    stream = setting.ranks.on_all_ranks(lambda: training_stream(setting, data, tokenise, layout))
    return run_of(setup, evaluation, stream)


def run_of(setup: RunSetup, evaluation: Evaluation, stream: BatchStream[Any, Any]) -> Run:
    """Give a model what training needs, in its evaluation too; all ranks call this together.

    Raises:
        UserError: The schedule needs an end that nobody knows.
    """
    setting, sharded = setup.setting, evaluation.sharded
    config, ranks, origin = setting.config, setting.ranks, sharded.origin
    if _needs_its_end(config):
        stream.count_rows(tokens=origin.image_processor is None)  # opening every image may take hours
    total = planned_steps(config, stream.steps_per_epoch())
    if setting.world.is_first and (ending := end_of_both(config, stream.steps_per_epoch())):
        print(ending, flush=True)
    ranks.on_all_ranks(lambda: _check_end(config, total))
    seed_rank(config.seed, setting.world.rank, deterministic=config.determinism)
    trained = trained_of(sharded, total)
    evaluation.sharded = trained
    marks = ranks.on_first_rank(lambda: image_fingerprints(setting, stream, origin))  # it reads images for all
    images = ranks.on_all_ranks(lambda: image_side_of(config, origin))
    rules = images.family.record if isinstance(images, ImageSide) else {}
    return Run(
        trained=trained,
        evaluation=evaluation,
        stream=read_ahead(setting, stream, total),
        source_names=tuple(source.name for source in setup.data.training),
        observers=setup.observers,
        identity=ranks.on_all_ranks(lambda: identity(setting, stream, origin, marks, rules)),
        image_rules=rules,
    )


def read_ahead(setting: Setting, stream: BatchStream[Any, Any], last_step: int | None) -> StreamAhead[Any]:
    """Return the stream, whose next batches a thread reads; all ranks call this together.

    Args:
        setting: Of the run.
        stream: Of prompts, or of batches to train on.
        last_step: Steps of the run; None if nobody knows.
    """
    minutes = setting.config.launch.timeout_minutes
    options = ReadAhead[Any](
        ranks=setting.ranks,
        own_ranks=RankGroup(2 * minutes),  # the wait for a batch ends first, on all ranks
        last_step=last_step,
        minutes=minutes,
        tell=setting.log.messages.extend,
    )
    if isinstance(stream, PromptStream):
        return StreamAhead(stream, options)
    return BatchesAhead(stream, replace(options, prepare=partial(pinned, device=setting.world.device)))


def trained_of(sharded: ShardedModel, total_steps: int | None) -> Trained:
    """Give a model the optimizer and the averages that its configuration asks for; all ranks call this together."""
    parameters = sharded_parameters(sharded.model)
    optimizer = optimizer_of(sharded.setting, parameters, sharded.model)
    averages = averages_of(sharded.setting.config.optim, parameters)
    offloads = sharded.setting.config.parallel.offloads
    steps_on_host = "optimizer" in offloads and "parameters" not in offloads
    return Trained(
        setting=sharded.setting,
        origin=sharded.origin,
        plan=sharded.plan,
        model=sharded.model,
        temperature=sharded.temperature,
        state=sharded.state,
        forms=sharded.forms,
        optimizer=optimizer,
        averages=averages,
        parameters=parameters,
        total_steps=total_steps,
        cost=cost_of(sharded.model, sharded.origin),
        host_steps=HostSteps(optimizer) if steps_on_host else None,
    )


def build_evaluation(config: SFTConfig, base: Path, world: World) -> Evaluation:
    """Return a model and its evaluation sets.

    Raises:
        UserError: As `build_run`.
    """
    return _evaluation(config, begin_evaluation(Setting.of(config, base, world)))


def _evaluation(config: SFTConfig, setup: RunSetup) -> Evaluation:
    setting, live, ranks = setup.setting, setup.live, setup.setting.ranks
    objective = live.objective or ranks.on_all_ranks(lambda: supervised_objective(config.objective, setting))
    sharded = build_model(setting, live, partial(look_at_rows, config, setup))
    images = image_side_of(config, sharded.origin)
    sets = evaluation_sets(setup, sharded, images)
    ranks.on_all_ranks(lambda: refuse_completions_with_images(config, sets, images))
    return Evaluation(sharded=sharded, objective=objective, sets=sets)


def look_at_rows(config: TrainingConfig, setup: RunSetup, origin: Blueprint) -> None:
    """Make sequences of the first rows of a run that is trained on their answers; all ranks call this together.

    Raises:
        UserError: As `check_first_rows`.
    """
    setting, data, tokenizer = setup.setting, setup.data, origin.tokenizer

    def tokenisers() -> tuple[Tokenise[Example], dict[str, Tokenise[Example]]]:
        images = image_side_of(config, origin)
        return (
            row_tokeniser(setting, tokenizer, data.formats, images),
            evaluation_tokenisers(setting, tokenizer, data, images),
        )

    sees = origin.image_processor is not None
    check_first_rows(setting, data, *setting.ranks.on_all_ranks(tokenisers), sees=sees)


def evaluation_sets(setup: RunSetup, sharded: ShardedModel, images: ImageSide | str) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets of a model that is measured on the answers of rows; all ranks call this together.

    Raises:
        DataError: A set holds a row that cannot be read; the same on all ranks.
    """
    setting, data, tokenizer = setup.setting, setup.data, sharded.origin.tokenizer
    reading = setting.ranks.on_all_ranks(
        lambda: SetReading(evaluation_tokenisers(setting, tokenizer, data, images), row_filter(setting)),
    )
    return opened_sets(setting, data, reading, layout_of(sharded, images))


def build_model(setting: Setting, live: Live, look: Callable[[Blueprint], None]) -> ShardedModel:
    """Return the policy on its ranks, without anything to measure it on; all ranks call this together.

    Args:
        setting: Of the run.
        live: What a Python caller brings.
        look: Raises what the tokenizer and the first rows have against each other, before a weight is read.

    Raises:
        UserError: As `look`, or the model cannot be trained; the same on all ranks.
    """
    config, base, ranks = setting.config, setting.base, setting.ranks
    if live.model is None:
        fingerprint_base_of_adapters(setting)
    origin = ranks.first_rank_first(
        lambda: blueprint(
            config.model, base, seed=config.seed, live=live.model, tokenizer=live.tokenizer, scorer=config.scores
        ),
    )
    look(origin)
    if is_fingerprinted(config):
        fingerprint_once(origin.directory, ranks)
    exports = ranks.first_rank_first(lambda: notes_of_exports(setting, origin.directory))
    note = ranks.on_all_ranks(lambda: check_positions(config, origin))
    return build_policy(setting, replace(origin, notes=(*origin.notes, *exports, *([note] if note else []))))


def _observers(setting: Setting, live: Live) -> tuple[Observer, ...]:
    configured = [Observer(path, load_function(path, setting.base, "observers")) for path in setting.config.observers]
    live_observers = (
        Observer(f"{getattr(function, '__name__', 'observer')} ({number})", function)
        for number, function in enumerate(live.observers)
    )
    return (*configured, *live_observers)


def _needs_its_end(config: TrainingConfig) -> bool:
    """Whether the number of steps depends on the rows and something else depends on that number."""
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
