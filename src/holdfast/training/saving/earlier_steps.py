"""Continue from an earlier step of the run, or as a branch from a checkpoint of another run.

A run goes back only once for each value of `checkpoint.resume.from`. A record next to its checkpoints says that it did,
so that the same command later continues normally. Later checkpoints are renamed only after the step was restored. If
the process is killed in between, there is no record yet: the same command goes back again, and a command without the
key continues from the newest checkpoint that still has its name. A branch keeps its record for good, and never returns
to its beginning.
"""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.checkpoint.format.verification import named_manifest
from holdfast.checkpoint.keep.find import one
from holdfast.checkpoint.keep.retention import changing, put_aside, steps
from holdfast.checkpoint.place.layout import LATER, fresh, step_name, step_of
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.errors import ConfigError
from holdfast.files import append_text, parse_json
from holdfast.parallel.collectives import RankGroup
from holdfast.training import directory
from holdfast.training.run import Training, say
from holdfast.training.saving.exports import rename_best_export
from holdfast.training.saving.resume import Continuation, go_on, restore_run

RECORD = ".resumed-from.json"


def go_on_from(
    training: Training, storage: Storage, ranks: RankGroup, run_id: str, *, has_checkpoints: bool
) -> tuple[Continuation | None, bool]:
    """Continue from where `checkpoint.resume.from` says, if the run was not there yet, or else as `go_on`.

    Returns:
        What the run continues from, None at its beginning; and whether that is a checkpoint of its own.

    Raises:
        ConfigError, NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: It is not there, damaged, or does not fit.
    """
    if _is_due(training, storage, has_checkpoints=has_checkpoints):
        return _go_to(training, storage, ranks, run_id)
    restored = go_on(training, storage, ranks, run_id) if has_checkpoints else None
    if restored is not None and training.run.config.checkpoint.resume.start is None:
        training.run.ranks.on_first_rank(lambda: _forget_step(storage))
    return restored, True


def _forget_step(storage: Storage) -> None:
    """Forget that the run went back to a step of its own, so that it can go back there again."""
    with changing(storage):
        done = _recorded(storage)
    if isinstance(done, int) or (done is not None and _step_in_storage(storage, done) is not None):
        storage.remove(RECORD)


def _is_due(training: Training, storage: Storage, *, has_checkpoints: bool) -> bool:
    """Return whether the run has to go to where `checkpoint.resume.from` says.

    Raises:
        ConfigError: The run has checkpoints of its own, and would have to leave them for another run's.
    """
    start = training.run.config.checkpoint.resume.start
    if training.run.config.dry_run:  # which begins at step 0, and finds no checkpoints where it writes
        return False
    done = training.run.ranks.on_first_rank(lambda: _done(training, storage, start, has_checkpoints=has_checkpoints))
    # A branch begins anew as long as it has saved nothing.
    return start is not None and (done != start or not has_checkpoints)


def _done(training: Training, storage: Storage, start: int | str | None, *, has_checkpoints: bool) -> int | str | None:
    """Return the `checkpoint.resume.from` that the run has already followed."""
    with changing(storage):
        done = _recorded(storage)
    if done != start and has_checkpoints and isinstance(start, str) and _step_in_storage(storage, start) is None:
        raise ConfigError(
            f"checkpoint.resume.from={start} is another run's, and {training.run.directory} has checkpoints of its "
            "own. Choose another run.name, which makes the run a branch of that checkpoint."
        )
    return done


def _recorded(storage: Storage) -> int | str | None:
    if not storage.exists(RECORD):
        return None
    try:
        value = parse_json(storage.read(RECORD))["from"]
    except (ValueError, KeyError, TypeError):
        return None  # what it says is damaged: the run goes back once more, and loses nothing by it
    return value if isinstance(value, int | str) else None


def _step_in_storage(storage: Storage, path: str) -> int | None:
    """Return the step that a path names in the run's own place; None for another place."""
    parent, _, name = path.rstrip("/").rpartition("/")
    step = step_of(name)
    same = parent == storage.root or Path(parent or ".").resolve() == Path(storage.root).resolve()
    return step if same else None


def _go_to(training: Training, storage: Storage, ranks: RankGroup, run_id: str) -> tuple[Continuation, bool]:
    """Put a run where the checkpoint left it that `checkpoint.resume.from` names; all ranks call this together.

    Returns:
        What it continues from, and whether that is the run's own.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: It is not there, damaged, or does not fit; nothing was
            changed.
    """
    start = training.run.config.checkpoint.resume.start
    assert start is not None
    step = start if isinstance(start, int) else _step_in_storage(storage, start)
    if step is None:
        return _branch(training, str(start), storage, ranks), False
    restored = _restored(training, storage, _name_of(storage, step, ranks), ranks, run_id)
    later = training.run.ranks.on_first_rank(lambda: _rename_later_steps(training, storage, step))
    say(training, f"going back to step {step}, which checkpoint.resume.from names, verified", *later, *restored.lines)
    return restored, True


def _name_of(storage: Storage, step: int, ranks: RankGroup) -> str:
    saved_steps = ranks.on_first_rank(lambda: sorted(steps(storage)))
    if step not in saved_steps:
        raise NoCheckpoint(
            f"checkpoint.resume.from={step}: {storage.root} has no checkpoint of that step; it has "
            f"{', '.join(map(str, saved_steps)) or 'none'}. A checkpoint of another run is named by its path."
        )
    return step_name(step)


def _restored(training: Training, storage: Storage, name: str, ranks: RankGroup, run_id: str | None) -> Continuation:
    manifest = named_manifest(storage, name, ranks)
    if not (manifest.finite or training.run.config.checkpoint.resume.not_finite):
        raise CheckpointCorrupt(
            f"{storage.root}/{name}: a tensor in it holds NaN or infinity. To continue from it nevertheless, set "
            "checkpoint.resume.not_finite: true."
        )
    return restore_run(training, storage, name, manifest, ranks, manifest.run_id if run_id is None else run_id)


def _rename_later_steps(training: Training, storage: Storage, step: int) -> list[str]:
    """Rename what is of later steps, the newest first, and note that the run went back; return words about it."""
    messages: list[str] = []
    with changing(storage):
        later = {number: name for number, name in reversed(steps(storage).items()) if number > step}
        for number, name in later.items():
            aside = fresh(LATER, name)
            put_aside(storage, name, aside)
            messages.append(f"step {number} is kept as {storage.root}/{aside}")
    messages += rename_best_export(training, step)
    _record(training, storage)
    event = {"event": "back", "step": step, "renamed": sorted(later)}
    append_text(training.run.directory / directory.EVENTS, json.dumps(event) + "\n")
    return messages


def _record(training: Training, storage: Storage) -> None:
    with changing(storage):
        storage.replace(RECORD, json.dumps({"from": training.run.config.checkpoint.resume.start}).encode())


def _location(path: str) -> tuple[str, str]:
    checkpoint = one(path)
    return checkpoint.storage.root, checkpoint.name


def _branch(training: Training, path: str, storage: Storage, ranks: RankGroup) -> Continuation:
    """Continue what another run saved, which stays as it is."""
    root, name = training.run.ranks.on_first_rank(lambda: _location(path))
    restored = _restored(training, open_storage(root), name, ranks, None)
    training.run.ranks.on_first_rank(lambda: _record(training, storage))
    say(training, f"a branch of {root}/{name}, step {restored.manifest.step}, which stays as it is", *restored.lines)
    return restored
