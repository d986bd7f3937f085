"""Reads checkpoints of verl and EasyR1, which have one pickle per rank for weights, for the optimizer and for the rest.

    [EXPERIMENT/] latest_checkpointed_iteration.txt (verl), checkpoint_tracker.json (EasyR1)
        global_step_N/ data.pt (verl), dataloader.pt (EasyR1)
            actor/ model_world_size_W_rank_R.pt optim_... extra_state_... fsdp_config.json huggingface/

Weights are DTensors, or ShardedTensors where FSDP1 had no mesh. EasyR1 names the parameters of its optimizer; verl
numbers them, and what a number means depends on how the model was wrapped (`unnamed_states.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.parts import opened_file
from holdfast.features.rescue.reading.record import (
    DamagedFile,
    ForeignCheckpoint,
    Position,
    UnreadableForeign,
    counted,
    refuse_outside,
)
from holdfast.features.rescue.reading.state_dicts import Rank, add_optimizer, add_weights
from holdfast.features.rescue.reading.torch_file import TorchFile
from holdfast.files import MOST_TEXT_BYTES, read_bytes, read_json

RANK_FILE = re.compile(r"^(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt$")
STEP_FOLDER = re.compile(r"^global_step_(\d{1,15})$")
TRACKER_FILES = ("latest_checkpointed_iteration.txt", "checkpoint_tracker.json")
_LOADERS = ("data.pt", "dataloader.pt")


def is_rank_folder(names: set[str]) -> bool:
    """Return whether a directory's names are those of a model's rank files."""
    return any(RANK_FILE.match(name) for name in names)


def newest_step(folder: Path) -> tuple[Path, list[str]]:
    """Return the step of a run that its tracker names, else the newest, and what is wrong between them.

    Raises:
        UnreadableForeign: There is no step.
    """
    steps = {int(match[1]): path for path in folder.iterdir() if (match := STEP_FOLDER.match(path.name))}
    tracked = _tracked(folder)
    if not steps:
        raise UnreadableForeign(f"{folder} has a tracker of verl or EasyR1 and no global_step_N beside it.")
    steps = {step: path for step, path in steps.items() if holds_something(path)} or steps
    if tracked is not None and tracked not in steps:
        newest = max(steps)
        message = f"the tracker names step {tracked}, whose directory is not there or empty; the newest is "
        message += steps[newest].name
        return steps[newest], [message]
    return steps[tracked if tracked is not None else max(steps)], []


def holds_something(folder: Path) -> bool:
    """Return whether there is any file below a directory."""
    return any(files for _, _, files in os.walk(folder))


def _tracked(folder: Path) -> int | None:
    try:
        text, record = folder / TRACKER_FILES[0], folder / TRACKER_FILES[1]
        if text.is_file():
            return int(read_bytes(text, 1000).decode().strip())
        if record.is_file():
            return int(read_json(record)["last_global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def read_rank_files(actor: Path) -> ForeignCheckpoint:
    """Return the checkpoint whose rank files lie in a directory, usually global_step_N/actor.

    Raises:
        UnreadableForeign: The names of its files contradict each other.
    """
    world, files = _listed(actor)
    config = actor / "fsdp_config.json"
    system = "verl" if config.is_file() or (actor.parent / _LOADERS[0]).is_file() else "EasyR1"
    if (actor.parent / _LOADERS[1]).is_file():
        system = "EasyR1"
    checkpoint = ForeignCheckpoint(system, "one file per rank", actor, world)
    step = STEP_FOLDER.match(actor.parent.name) or STEP_FOLDER.match(actor.name)
    checkpoint.step = int(step[1]) if step else None
    described = actor / "huggingface"
    with checkpoint.naming(described.name):
        refuse_outside(described, actor)
        checkpoint.model_files = described if (described / "config.json").is_file() else None
    _check_config(checkpoint, config, world)
    models = _opened(checkpoint, files["model"], world, "model")
    optimizers = _opened(checkpoint, files["optim"], world, "optim") if files["optim"] else None
    checkpoint.has_optimizer = bool(files["optim"])
    with checkpoint.naming(""):
        if models is not None:
            add_weights(checkpoint, models)
    with checkpoint.naming(""):
        if optimizers is not None:
            add_optimizer(checkpoint, optimizers)
    _add_rest(checkpoint, files["extra_state"], world)
    _add_position(checkpoint, actor)
    return checkpoint


def _listed(actor: Path) -> tuple[int, dict[str, dict[int, Path]]]:
    """Return the world size, and the file of each rank by kind.

    Raises:
        UnreadableForeign: The names speak of two world sizes.
    """
    files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}, "extra_state": {}}
    sizes: dict[int, str] = {}
    for path in sorted(actor.iterdir()):
        match = RANK_FILE.match(path.name)
        if match:
            sizes.setdefault(int(match[2]), path.name)
            files[match[1]][int(match[3])] = path
    if len(sizes) > 1:
        raise UnreadableForeign(
            f"{actor} holds rank files of several world sizes ({', '.join(map(str, sorted(sizes)))}), as where a run "
            f"was started again on other ranks over an old save: {' and '.join(sizes.values())}. Move the older ones "
            "away, and try again."
        )
    return next(iter(sizes)), files


def _check_config(checkpoint: ForeignCheckpoint, path: Path, world: int) -> None:
    if not path.is_file():
        return
    try:
        values = read_json(path)
        if values["world_size"] != world:
            checkpoint.add(
                "damage", f"{path.name} says {values['world_size']} ranks, the names of the files say {world}"
            )
        checkpoint.form = f"one file per rank (FSDP{values['FSDP_version']})"
    except (OSError, ValueError, KeyError, TypeError) as error:
        checkpoint.add("note", f"{path.name} cannot be read: {error}")


def _opened(checkpoint: ForeignCheckpoint, files: Mapping[int, Path], world: int, kind: str) -> list[Rank] | None:
    """Return every rank's file of a kind; None where one is missing or damaged, which is noted."""
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        names = ", ".join(f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in missing[:4])
        checkpoint.add("damage", f"{names} is missing" if len(missing) == 1 else f"{names} are missing")
    if extra := sorted(set(files) - set(range(world))):
        checkpoint.add("damage", f"{files[extra[0]].name} is of a rank beyond its own world size")
    opened: list[Rank] = []
    for rank in sorted(files):
        with checkpoint.naming(files[rank].name):
            opened.append(_of_its_rank(opened_file(checkpoint, files[rank])))
    return opened if len(opened) == world and not extra else None


def _of_its_rank(file: TorchFile) -> Rank:
    """Return a file with what its pickle holds.

    Raises:
        DamagedFile: It is damaged, or torch.save was given the name of another rank's file.
    """
    if file.written_as != file.path.stem and RANK_FILE.match(f"{file.written_as}.pt"):
        raise DamagedFile(f"was written as {file.written_as}.pt: it lies in the place of another rank's file")
    return file, file.value()


def _add_rest(checkpoint: ForeignCheckpoint, files: Mapping[int, Path], world: int) -> None:
    """Read schedule and random state; every rank holds its own, and the schedules must agree."""
    opened = _opened(checkpoint, files, world, "extra_state") if files else None
    if not files:
        checkpoint.add("loss", "no extra_state files: the schedule's place and random state are not there")
    if opened is None:
        return
    last = []
    for file, content in opened:
        match content:
            case {"lr_scheduler": dict() | None as schedule, "rng": dict()}:
                last.append((schedule or {}).get("last_epoch"))
                checkpoint.schedule = checkpoint.schedule or schedule
            case _:
                checkpoint.add("damage", f"{file.path.name} holds neither schedule nor random state")
                return
    if len(set(last)) > 1:
        checkpoint.add("damage", f"ranks are of different steps: their schedules stand at {sorted(set(last), key=str)}")
    _note_other_step(checkpoint)
    checkpoint.random_state = True


def _note_other_step(checkpoint: ForeignCheckpoint) -> None:
    last = (checkpoint.schedule or {}).get("last_epoch")
    checkpoint.schedule_step = last if type(last) is int else None
    if checkpoint.step is not None and isinstance(last, int) and last != checkpoint.step:
        checkpoint.add(
            "note",
            "its schedule does not stand at its step: a step of several updates, or files of two saves; see --step",
        )


def _add_position(checkpoint: ForeignCheckpoint, actor: Path) -> None:
    path = next((actor.parent / name for name in _LOADERS if (actor.parent / name).is_file()), None)
    if path is None:
        return
    if path.stat().st_size > MOST_TEXT_BYTES:
        checkpoint.add("damage", f"{path.name} is larger than any state of a loader")
        return
    with checkpoint.naming(path.name):
        checkpoint.position = position_of(opened_file(checkpoint, path, within=path.parent).value())


def position_of(loader: Any) -> Position | None:
    """Return the rows that a torchdata StatefulDataLoader has given; None where its state does not say.

    Raises:
        DamagedFile: The number is none.
    """
    match loader:
        case {"_snapshot": {"_main_snapshot": main, **snapshot}, "_steps_since_snapshot": int(since)}:
            return _of_workers(main, snapshot.get("_snapshot_step"), since)
        case {"_sampler_iter_state": {"samples_yielded": int(rows)}}:
            return Position(None, rows=counted(rows, "the number of rows"))
        case {"_num_yielded": int(batches)}:
            return Position(None, batches=counted(batches, "the number of batches"))
    return None


def _of_workers(main: Any, batches: Any, since: int) -> Position | None:
    """Return the rows of a loader with workers: those up to its snapshot, and of the batches that came since."""
    match main:
        case {"_sampler_iter_state": {"samples_yielded": int(rows)}}:
            rows, since = counted(rows, "the number of rows"), counted(since, "the number of batches")
            if since == 0:
                return Position(None, rows=rows)
            if type(batches) is int and batches > 0 and rows % batches == 0:
                return Position(None, rows=rows // batches * (batches + since))
            return Position(None, batches=since) if rows == 0 else None
    return None


def tracker_text(folder: Path) -> str:
    """Return what the tracker of a run says, for a person."""
    for name in TRACKER_FILES:
        if (folder / name).is_file():
            return json.dumps(read_bytes(folder / name, 10_000).decode(errors="replace"))
    return ""
