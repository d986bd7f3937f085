"""Writes another system's checkpoint as one of a Holdfast run; the command of the run then continues it.

The run is built without memory, so that what its own resume would refuse is refused before anything is written, in the
same words. Tensors are read as they are written, one at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.export.stored import PARENT
from holdfast.checkpoint.format.manifest import About, Manifest, TensorEntry
from holdfast.checkpoint.format.snapshot import MODEL, OPTIM, Snapshot, hold, random_state, random_state_as_json
from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.loading.matching import Declared, refusal
from holdfast.checkpoint.loading.parts import Part
from holdfast.checkpoint.loading.plan import plan_part
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.storage import open_storage
from holdfast.checkpoint.saving.agreement import described_optimizers
from holdfast.checkpoint.saving.writer import commit
from holdfast.config.verbs.training import TrainingConfig
from holdfast.config.versions import versions
from holdfast.data.batches.passes import Cursor
from holdfast.errors import ConfigError
from holdfast.features.rescue.export import read_finite
from holdfast.features.rescue.importing.configurations import compare_configurations, refuse_without_weights
from holdfast.features.rescue.importing.states import PlannedTensor, described_state, planned_states, rate_of
from holdfast.features.rescue.importing.weightless import weightless_run
from holdfast.features.rescue.reading.alignment import align
from holdfast.features.rescue.reading.rank_order import refuse_untold_order
from holdfast.features.rescue.reading.record import ForeignCheckpoint, Position
from holdfast.models.names import tied_names
from holdfast.optim.schedule import learning_rate_factor
from holdfast.parallel.mesh import World
from holdfast.training import directory
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Training, TrainState
from holdfast.training.saving.leases import RunLeases
from holdfast.training.saving.resume import IMPORTED
from holdfast.training.saving.run_snapshot import fingerprints_of, run_assets


@dataclass(frozen=True)
class ImportOptions:
    """The options that a user gives for an import."""

    data_from_start: bool = False
    step: int | None = None
    """The step, where the checkpoint states none."""
    trust_rank_order: bool = False
    """Believe the rank in a file's name where the file itself does not state one."""


@dataclass(frozen=True)
class ImportResult:
    """The checkpoint that an import wrote."""

    path: str
    """Path of the checkpoint."""
    notes: list[str]
    override: str = ""
    """The override that the run's command needs besides its file."""


def import_run(
    checkpoint: ForeignCheckpoint, config: TrainingConfig, base: Path, world: World, options: ImportOptions
) -> ImportResult:
    """Write a checkpoint of a new run, or of weights alone where there is nothing else.

    Raises:
        ConfigError: The run exists; the step, the position in the data or the order of ranks is not stated.
        CheckpointMismatch: The checkpoint does not fit the run; nothing was written.
        CheckpointCorrupt: A file is damaged; nothing was left behind.
    """
    if not options.trust_rank_order:
        refuse_untold_order(checkpoint, "weights", "optimizer")
    step = _step(checkpoint, options)
    refuse_without_weights(checkpoint, config, base)
    training = weightless_run(config, base, world)
    if directory.is_run(training.run.directory):
        raise ConfigError(
            f"{training.run.directory} is a run already, and an import begins one. Give another name: run.name in the "
            "file."
        )
    model_state = hold(training.model.module)
    notes = compare_configurations(checkpoint, training)
    align(checkpoint, {*model_state.parameters, *model_state.buffers}, tied_names(training.model.module))
    if not checkpoint.states:
        return _import_weights(training, checkpoint, step, notes)
    snapshot = _snapshot(training, checkpoint, step)
    _refuse_misfit(training, checkpoint, snapshot, step)
    notes += [*_repairs(checkpoint), *_without_state(checkpoint)]
    notes += _set_position(training, checkpoint, step, options)
    return ImportResult(_write_run(training, checkpoint, snapshot, step), notes)


def _import_weights(training: Training, checkpoint: ForeignCheckpoint, step: int, notes: list[str]) -> ImportResult:
    """Write weights alone as what they are: a checkpoint that a run begins from, and that none resumes.

    Raises:
        ConfigError, CheckpointMismatch, CheckpointCorrupt: As `import_run`.
    """
    target = training.run.directory.with_name(f"{training.run.directory.name}-weights")
    if target.exists():
        raise ConfigError(f"{target} is there already, and nothing is overwritten. Give another run.name in the file.")
    names = training.model.parameters
    snapshot = _snapshot_of(
        {
            MODEL + name: PlannedTensor(tensor.shape, tensor.dtype, tensor.read)
            for name, tensor in checkpoint.weights.items()
        },
        frozenset(MODEL + name for name, value in names.items() if value.requires_grad),
        training,
    )
    _refuse_misfit(training, checkpoint, snapshot, step)
    storage = open_storage(str(target))
    deviation = f"weights {_origin(checkpoint)}"
    about = About(run_id="", step=step, versions=versions(), deviations=(deviation,))
    try:
        commit(snapshot, storage, about, training.run.ranks, name=step_name(step))
        verify_checkpoint(storage, step_name(step), "files")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    summary = "it holds weights alone: the run begins at step 0 with a new optimizer, schedule and order of rows"
    path = f"{target}/{step_name(step)}"
    return ImportResult(path, [*notes, *_repairs(checkpoint), summary], f"checkpoint.init_from={path}")


def _origin(checkpoint: ForeignCheckpoint) -> str:
    trusted = ", with its order of ranks taken from the names of its files" if checkpoint.untold_order else ""
    return f"imported from {checkpoint.system} ({checkpoint.path}){trusted}"


def _repairs(checkpoint: ForeignCheckpoint) -> list[str]:
    return [f"repaired: {finding.text}" for finding in checkpoint.of_kind("repair")]


def _without_state(checkpoint: ForeignCheckpoint) -> list[str]:
    """Return a note on parameters of the optimizer that have no state."""
    names = [
        name
        for group in checkpoint.groups
        for name in group.names
        if name in checkpoint.weights and name not in checkpoint.states and name not in checkpoint.tied_away
    ]
    if not names:
        return []
    return [
        f"{len(names)} parameters of the optimizer have no state, such as {names[0]}: they begin with moments of zero"
    ]


def _step(checkpoint: ForeignCheckpoint, options: ImportOptions) -> int:
    step = checkpoint.step if options.step is None else options.step
    if step is None and not checkpoint.states:
        return 0
    if step is None:
        raise ConfigError(
            f"{checkpoint.path} does not state its step, where the schedule has to go on. Give it: --step N."
        )
    last = checkpoint.schedule_step
    if checkpoint.step is not None and step not in {checkpoint.step, last}:
        of = f"step {checkpoint.step}" + (f", its schedule at {last}" if last not in {None, checkpoint.step} else "")
        raise ConfigError(f"{checkpoint.path} is of {of}, and --step says {step}. Leave --step out.")
    return step


def _snapshot(training: Training, checkpoint: ForeignCheckpoint, step: int) -> Snapshot:
    """Return what will be written; its tensors have no memory until they are."""
    states = planned_states(checkpoint, training.model.updater, training.model.parameters)
    planned = {
        MODEL + name: PlannedTensor(tensor.shape, tensor.dtype, tensor.read)
        for name, tensor in checkpoint.weights.items()
    }
    planned |= {f"{OPTIM}{name}.{slot}": tensor for name, slots in states.items() for slot, tensor in slots.items()}
    seed_rank(training.run.config.seed, 0, deterministic=training.run.config.determinism, step=step)
    trained = {name for group in checkpoint.groups for name in group.names} | set(checkpoint.states)
    snapshot = _snapshot_of(planned, frozenset(MODEL + name for name in trained), training)
    by_name = {
        name: {slot: snapshot.tensors[f"{OPTIM}{name}.{slot}"] for slot in slots} for name, slots in states.items()
    }
    return replace(
        snapshot,
        optimizer=described_state(checkpoint, training.model.updater, by_name),
        rank_state={"random": random_state_as_json(random_state())},
        contents=("model", "optimizer", "trainer", "rank"),
    )


def _snapshot_of(planned: Mapping[str, PlannedTensor], trained: frozenset[str], training: Training) -> Snapshot:
    """Return a snapshot of tensors that are read when they are written."""
    return Snapshot(
        tensors={name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in planned.items()},
        trained=trained,
        ties=hold(training.model.module).ties,
        optimizer=None,
        rank_state={},
        shared={},
        contents=("model",),
        readers={name: partial(read_finite, name, tensor.read) for name, tensor in planned.items()},
    )


def _refuse_misfit(training: Training, checkpoint: ForeignCheckpoint, snapshot: Snapshot, step: int) -> None:
    """Compare with the run as its own resume will.

    Raises:
        CheckpointMismatch: It would refuse it.
    """
    entries = {
        name: TensorEntry(tuple(value.shape), str(value.dtype).removeprefix("torch."), (), name in snapshot.trained)
        for name, value in snapshot.tensors.items()
    }
    manifest = Manifest("", step, snapshot.contents, {}, entries, optimizer=described_optimizers(snapshot))
    resume = training.run.config.checkpoint.resume
    declared = Declared(resume.add, resume.drop, resume.cast, resume.freeze, resume.unfreeze)
    model = training.model
    optimizer = None if snapshot.optimizer is None else model.optimizer
    refused = plan_part(Part("", model.module, model.parameters, optimizer), manifest, declared, "live").match.refused
    if refused:
        raise CheckpointMismatch(refusal(str(checkpoint.path), [*refused[:3], *_hints(training, checkpoint)]))


def _hints(training: Training, checkpoint: ForeignCheckpoint) -> Iterator[str]:
    """Yield what a file of the run would have to say, where most of a misfit has one cause."""
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in checkpoint.weights.values()}
    if len(dtypes) == 1 and dtypes != {training.run.config.model.dtype}:
        yield f"model.dtype: {dtypes.pop()} would fit its weights"
    names = training.model.parameters
    frozen = sorted(name for name in names if name in checkpoint.weights and name not in checkpoint.states)
    here = [name for name in frozen if names[name].requires_grad]
    if here and checkpoint.states:
        yield f"it trained {len(checkpoint.states)} parameters; model.freeze must name the others, such as {here[0]}"


def _set_position(training: Training, checkpoint: ForeignCheckpoint, step: int, options: ImportOptions) -> list[str]:
    """Put the run at a step and its rows where they stood; return what to say of it.

    Raises:
        ConfigError: The position is not stated, and the rows were not to begin anew.
    """
    training.model.state = TrainState(step=step, updates=step)
    notes = []
    if options.data_from_start:
        notes.append("data: the rows begin anew (--data-from-start)")
    elif checkpoint.position is None:
        raise ConfigError(
            f"{checkpoint.path} does not state its position in the data. Give --data-from-start to begin the rows "
            "anew; rows that were trained on come again. Nothing was written."
        )
    else:
        cursor, note = _cursor(training, checkpoint, checkpoint.position)
        training.stream.load_state(training.stream.state() | {"cursor": asdict(cursor)})
        notes.append(note)
    return [*notes, *_compare_rates(training, checkpoint, step)]


def _cursor(training: Training, checkpoint: ForeignCheckpoint, position: Position) -> tuple[Cursor, str]:
    """Return where the rows go on, and words about it.

    Raises:
        ConfigError: A position in rows says nothing here.
    """
    data, size = training.run.config.data, training.stream.state()["sizes"]
    total_rows = None if None in size else sum(size)
    if data.packing == "wrapped" or (total_rows is None and (position.epoch or position.share)):
        raise ConfigError(
            f"{checkpoint.path} states its position in rows, and here windows are cut across rows or nobody knows how "
            "many there are. Give --data-from-start to begin them anew. Nothing was written."
        )
    rows = _rows_done(position, data.batch_size, total_rows or 0)
    if total_rows is not None and rows > total_rows:
        raise ConfigError(
            f"{checkpoint.path} had drawn {rows:,} rows of its pass, and data.path has {total_rows:,}: they are other "
            "rows. Name the same ones, or give --data-from-start. Nothing was written."
        )
    done = _passes_done(checkpoint, position, rows, data.batch_size, total_rows or 0)
    cursor = _cursor_after(rows, done or 0, total_rows or 0, data.batch_size)
    return cursor, _position_note(rows, done, shuffled=data.shuffle)


def _cursor_after(rows: int, passes: int, total_rows: int, batch_size: int) -> Cursor:
    first = passes * total_rows
    return Cursor(first + rows, passes, first, math.ceil(rows / batch_size), rows, 0)


def _position_note(rows: int, done: int | None, *, shuffled: bool) -> str:
    name = "a pass whose number is not stated, and which is the first here" if done is None else f"pass {done + 1}"
    if not rows:
        return f"data: goes on with the first row of {name}"
    note = f"data: goes on behind {rows:,} rows of {name}"
    if shuffled:
        note += ", in this run's own order: some of these come again, and as many that were not trained on do not come"
    return note


def _passes_done(
    checkpoint: ForeignCheckpoint, position: Position, rows: int, batch_size: int, total_rows: int
) -> int | None:
    """Return the passes that were done; where only the step is stated, those that make it a whole number of passes."""
    if position.epoch is not None:
        return position.epoch
    a_pass = total_rows // batch_size * batch_size  # a last batch that is not full is left out
    before = (checkpoint.step or 0) * batch_size - rows
    return before // a_pass if a_pass and before >= 0 and before % a_pass == 0 else None


def _rows_done(position: Position, batch_size: int, total_rows: int) -> int:
    """Return the rows of the pass that were drawn, from whatever the system counts."""
    if position.rows is not None:
        return position.rows
    if position.batches is not None:
        return position.batches * batch_size
    return round((position.share or 0.0) * total_rows)


def _compare_rates(training: Training, checkpoint: ForeignCheckpoint, step: int) -> list[str]:
    """Compare the learning rates there and here."""
    optim, total = training.run.config.optim, training.run.config.steps
    source_rate = rate_of(checkpoint)
    if source_rate is None or (optim.schedule.needs_last_step and total is None):
        return []
    rate = optim.lr * learning_rate_factor(optim.schedule, step, total)
    return [f"learning rate: {source_rate:g} there, {rate:g} for the next step here (optim.lr and optim.schedule)"]


def _write_run(training: Training, checkpoint: ForeignCheckpoint, snapshot: Snapshot, step: int) -> str:
    """Write a checkpoint and its run's directory; return the checkpoint's path."""
    run, config = training.run, training.run.config
    lost = [finding.text for finding in checkpoint.of_kind("loss")]
    source = {"system": checkpoint.system, "path": str(checkpoint.path), "step": step}
    assets = dict(run_assets(training)) | {PARENT: json.dumps({IMPORTED: source}, sort_keys=True).encode()}
    shared = {
        "state": training.model.state.as_plain(),
        "stream": training.stream.state(),
        IMPORTED: {**source, "lost": lost},
    }
    storage = open_storage(directory.checkpoint_place(run.directory, config))
    leases = RunLeases(run.directory, storage, lambda _: None)
    with ExitStack() as stack:
        leases.take(stack)
        try:
            directory.create(run.directory, config, config.verb, None, {IMPORTED: source})
            about = About(
                run_id=directory.run_id(run.directory),
                step=step,
                versions=versions(),
                deviations=(_origin(checkpoint),),
                fingerprints=fingerprints_of(training),
            )
            complete = replace(snapshot, shared=shared, assets=assets)
            commit(complete, storage, about, run.ranks, name=step_name(step))
            verify_checkpoint(storage, step_name(step), "files")
            directory.note_saved(run.directory, step)
        except BaseException:
            leases.remove()
            raise
    return f"{storage.root}/{step_name(step)}"
