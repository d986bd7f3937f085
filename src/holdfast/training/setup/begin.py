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
from holdfast.training.run import Evaluation, EvaluationSet, Model, Run, Training
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
from holdfast.training.setup.updates import settle_update_form


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

    run: Run
    live: Live
    data: OpenedData
    observers: tuple[Observer, ...]


def begin(run: Run, live: Live) -> RunSetup:
    """Check the directory, load observers and open the rows.

    Raises:
        UserError: A check failed; the same on all ranks, and nothing has been written.
    """
    with run.ranks.together():
        if run.world.is_first:
            check_writable(run.directory)
            if "objective" not in run.config.checkpoint.resume.changed:
                check_verb(run.directory, run.config.verb)
    settle_frozen(run, live=live.model is not None)
    with run.ranks.together():
        if run.config.metrics.sinks:
            registry.load(registry.TRACKER_CHECK)(run.config.metrics.sinks, run.base)
        observers = _observers(run, live)
    data = run.ranks.first_rank_first(lambda: open_data(run, live.rows))
    check_same_rows(run, data, live=live.rows is not None)
    check_batch(run.config, data, run.world.size)
    return RunSetup(run, live, data, observers)


def begin_evaluation(run: Run) -> RunSetup:
    """Open the rows; those of training only if a validation split is cut from them.

    Raises:
        UserError: As `begin`.
    """
    run.trains = False
    settle_frozen(run, live=False, trains=False)
    training = run.config.data.validation_split > 0
    data = run.ranks.first_rank_first(lambda: open_data(run, training=training))
    check_same_rows(run, data)
    return RunSetup(run, Live(), data, ())


def build_run(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Training:
    """Return a supervised training that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    run = Run.of(config, base, world)
    setup = begin(run, live or Live())
    evaluation = _evaluation(config, setup)
    model = evaluation.model
    with run.ranks.together():
        images = image_side_of(config, model.blueprint)
        tokenise = row_tokeniser(run, model.blueprint.tokenizer, setup.data.formats, images)
        stream = training_stream(run, setup.data, tokenise, layout_of(model, images))
    return training_of(setup, evaluation, stream)


def training_of(setup: RunSetup, evaluation: Evaluation, stream: BatchStream[Any, Any]) -> Training:
    """Give the model of an evaluation an optimizer, and return the parts of its training; all ranks call this together.

    Raises:
        UserError: The schedule needs an end that nobody knows.
    """
    run, model = setup.run, evaluation.model
    config, ranks, origin = run.config, run.ranks, model.blueprint
    if _needs_its_end(config):
        stream.count_rows(tokens=origin.image_processor is None)  # opening every image may take hours
    total = planned_steps(config, stream.steps_per_epoch())
    if run.world.is_first and (ending := end_of_both(config, stream.steps_per_epoch())):
        print(ending, flush=True)
    _check_end(config, total)
    seed_rank(config.seed, run.world.rank, deterministic=config.determinism)
    give_optimizer(model, total)
    settle_update_form(model)
    marks = ranks.on_first_rank(lambda: image_fingerprints(run, stream, origin))  # it reads images for all
    with ranks.together():
        images = image_side_of(config, origin)
        rules = images.family.record if isinstance(images, ImageSide) else {}
        fingerprints = identity(run, stream, origin, marks, rules)
    return Training(
        evaluation=evaluation,
        stream=read_ahead(run, stream, total),
        source_names=tuple(source.name for source in setup.data.training),
        observers=setup.observers,
        identity=fingerprints,
        image_rules=rules,
    )


def read_ahead(run: Run, stream: BatchStream[Any, Any], last_step: int | None) -> StreamAhead[Any]:
    """Return the stream, whose next batches a thread reads; all ranks call this together.

    Args:
        run: Of the run.
        stream: Of prompts, or of batches to train on.
        last_step: Steps of the run; None if nobody knows.
    """
    minutes = run.config.launch.timeout_minutes
    options = ReadAhead[Any](
        ranks=run.ranks,
        own_ranks=RankGroup(2 * minutes),  # the wait for a batch ends first, on all ranks
        last_step=last_step,
        minutes=minutes,
        tell=run.log.messages.extend,
    )
    if isinstance(stream, PromptStream):
        return StreamAhead(stream, options)
    return BatchesAhead(stream, replace(options, prepare=partial(pinned, device=run.world.device)))


def give_optimizer(model: Model, total_steps: int | None) -> None:
    """Give a model the optimizer and the averages that its configuration asks for; all ranks call this together."""
    offloads = model.run.config.parallel.offloads
    model.parameters = sharded_parameters(model.module)
    model.optimizer = optimizer_of(model.run, model.parameters, model.module)
    model.averages = averages_of(model.run.config.optim, model.parameters)
    model.total_steps = total_steps
    model.cost = cost_of(model.module, model.blueprint)
    if "optimizer" in offloads and "parameters" not in offloads:
        model.host_steps = HostSteps(model.optimizer)


def build_evaluation(config: SFTConfig, base: Path, world: World) -> Evaluation:
    """Return a model and its evaluation sets.

    Raises:
        UserError: As `build_run`.
    """
    return _evaluation(config, begin_evaluation(Run.of(config, base, world)))


def _evaluation(config: SFTConfig, setup: RunSetup) -> Evaluation:
    run, live = setup.run, setup.live
    with run.ranks.together():
        objective = live.objective or supervised_objective(config.objective, run)
    model = build_model(run, live, partial(look_at_rows, config, setup))
    images = image_side_of(config, model.blueprint)
    sets = evaluation_sets(setup, model, images)
    with run.ranks.together():
        refuse_completions_with_images(config, sets, images)
    return Evaluation(model=model, objective=objective, sets=sets)


def look_at_rows(config: TrainingConfig, setup: RunSetup, origin: Blueprint) -> None:
    """Make sequences of the first rows of a run that is trained on their answers; all ranks call this together.

    Raises:
        UserError: As `check_first_rows`.
    """
    run, data, tokenizer = setup.run, setup.data, origin.tokenizer
    with run.ranks.together():
        images = image_side_of(config, origin)
        tokenise = row_tokeniser(run, tokenizer, data.formats, images)
        of_sets = evaluation_tokenisers(run, tokenizer, data, images)
    check_first_rows(run, data, tokenise, of_sets, sees=origin.image_processor is not None)


def evaluation_sets(setup: RunSetup, model: Model, images: ImageSide | str) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets of a model that is measured on the answers of rows; all ranks call this together.

    Raises:
        DataError: A set holds a row that cannot be read; the same on all ranks.
    """
    run, data = setup.run, setup.data
    with run.ranks.together():
        tokenise = evaluation_tokenisers(run, model.blueprint.tokenizer, data, images)
        reading = SetReading(tokenise, row_filter(run))
    return opened_sets(run, data, reading, layout_of(model, images))


def build_model(run: Run, live: Live, look: Callable[[Blueprint], None]) -> Model:
    """Return the policy on its ranks, without anything to measure it on; all ranks call this together.

    Args:
        run: Of the run.
        live: What a Python caller brings.
        look: Raises what the tokenizer and the first rows have against each other, before a weight is read.

    Raises:
        UserError: As `look`, or the model cannot be trained; the same on all ranks.
    """
    config, base, ranks = run.config, run.base, run.ranks
    if live.model is None:
        fingerprint_base_of_adapters(run)
    origin = ranks.first_rank_first(
        lambda: blueprint(
            config.model, base, seed=config.seed, live=live.model, tokenizer=live.tokenizer, scorer=config.scores
        ),
    )
    look(origin)
    if is_fingerprinted(config):
        fingerprint_once(origin.directory, ranks)
    exports = ranks.first_rank_first(lambda: notes_of_exports(run, origin.directory))
    with ranks.together():
        note = check_positions(config, origin)
    return build_policy(run, replace(origin, notes=(*origin.notes, *exports, *([note] if note else []))))


def _observers(run: Run, live: Live) -> tuple[Observer, ...]:
    configured = [Observer(path, load_function(path, run.base, "observers")) for path in run.config.observers]
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
