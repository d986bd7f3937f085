"""Recognises by file names alone which system wrote the checkpoint at a path, and chooses its reader."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint.format.manifest import NAME as MANIFEST
from holdfast.checkpoint.place.memory import collection_paused
from holdfast.features.rescue.reading.accelerate import is_accelerate, read_accelerate
from holdfast.features.rescue.reading.dcp_directory import is_dcp
from holdfast.features.rescue.reading.dcp_systems import read_plain
from holdfast.features.rescue.reading.hugging_face import is_hugging_face, read_hugging_face
from holdfast.features.rescue.reading.lightning import META, read_lightning
from holdfast.features.rescue.reading.rank_files import (
    STEP_FOLDER,
    TRACKER_FILES,
    holds_something,
    is_rank_folder,
    newest_step,
    read_rank_files,
)
from holdfast.features.rescue.reading.record import MALFORMED, ForeignCheckpoint, UnreadableForeign, never_written

_DEEPSPEED = re.compile(r"^(zero_pp_rank_\d+_.*|mp_rank_\d+_model_states)\.pt$|^zero_to_fp32\.py$")
_SUPPORTED = (
    "verl and EasyR1 rank files, accelerate, transformers' Trainer and TRL under FSDP, Lightning, torchtitan, DCP "
    "directories, Hugging Face directories"
)


class RecognisedCheckpoint(NamedTuple):
    """A path that holds a checkpoint, and what reads it."""

    path: Path
    read: Callable[[Path], ForeignCheckpoint]
    damage: tuple[str, ...] = ()
    """What is wrong in the directories above the checkpoint."""
    notes: tuple[str, ...] = ()
    """What was skipped on the way to the checkpoint."""


def open_foreign(path: Path) -> ForeignCheckpoint:
    """Return what a path holds; headers are read, tensors are not. Nothing is written, and nothing in it is run.

    Raises:
        UnreadableForeign: It holds none that is known, or those of two systems.
    """
    recognised = None
    try:
        recognised = recognise_checkpoint(path)
        with collection_paused():
            checkpoint = recognised.read(recognised.path)
    except MALFORMED as error:
        raise UnreadableForeign(f"{never_written(recognised.path if recognised else path, error)}.") from error
    except OSError as error:
        raise UnreadableForeign(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    checkpoint.add("damage", *recognised.damage)
    checkpoint.add("note", *recognised.notes)
    return checkpoint


def recognise_checkpoint(path: Path) -> RecognisedCheckpoint:
    """Return where a path's checkpoint is, and its reader.

    Raises:
        UnreadableForeign: As `open_foreign`.
    """
    if path.is_symlink() and not path.exists():
        raise UnreadableForeign(f"{path} is a link that leads nowhere.")
    if not path.exists():
        raise UnreadableForeign(f"There is nothing at {path}.")
    if path.is_file():
        return _recognise_file(path)
    names = {entry.name for entry in path.iterdir()}
    if not names:
        raise UnreadableForeign(f"{path} is an empty directory.")
    if MANIFEST in names:
        raise UnreadableForeign(f"{path} is a checkpoint of Holdfast: `holdfast checkpoint verify {path}` checks it.")
    _refuse_deepspeed(path, names)
    systems = _systems(path, names)
    if len(systems) > 1:
        raise UnreadableForeign(
            f"{path} holds checkpoints of two systems: {' and '.join(systems)}. Move one of them into a directory of "
            "its own, and try again."
        )
    if systems:
        return next(iter(systems.values()))
    return _checkpoint_below(path, names)


def _recognise_file(path: Path) -> RecognisedCheckpoint:
    if path.suffix == ".ckpt":
        return RecognisedCheckpoint(path, read_lightning)
    if path.suffix == ".safetensors":
        return RecognisedCheckpoint(path, read_hugging_face)
    raise UnreadableForeign(
        f"{path} is one file. Name the directory of a checkpoint, a .ckpt of Lightning, or a file of safetensors."
    )


def _systems(path: Path, names: set[str]) -> dict[str, RecognisedCheckpoint]:
    """Return every system whose names a directory has."""
    systems: dict[str, RecognisedCheckpoint] = {}
    if is_rank_folder(names):
        systems["verl or EasyR1"] = RecognisedCheckpoint(path, read_rank_files)
    if is_accelerate(names):
        systems["accelerate or transformers' Trainer"] = RecognisedCheckpoint(path, read_accelerate)
    elif is_hugging_face(names):
        systems["Hugging Face"] = RecognisedCheckpoint(path, read_hugging_face)
    if META in names:
        systems["Lightning"] = RecognisedCheckpoint(path, read_lightning)
    elif is_dcp(path):
        systems["DCP"] = RecognisedCheckpoint(path, read_lightning if path.suffix == ".ckpt" else read_plain)
    return systems


def _checkpoint_below(path: Path, names: set[str]) -> RecognisedCheckpoint:
    """Return the checkpoint in a directory of steps, or in a run's.

    Raises:
        UnreadableForeign: There is none, or nobody can say which.
    """
    if names & set(TRACKER_FILES) or any(STEP_FOLDER.match(name) for name in names):
        step, damage = newest_step(path)
        inner = recognise_checkpoint(step)
        return inner._replace(damage=(*damage, *inner.damage))
    newest, notes = _newest(path, names)
    inner_name = "actor" if "actor" in names else newest or "checkpoint"
    if inner_name in names and (path / inner_name).is_dir():
        inner = recognise_checkpoint(path / inner_name)
        return inner._replace(notes=(*notes, *inner.notes)) if inner_name == newest else inner
    checkpoints = {(path / name).resolve(): name for name in sorted(names, reverse=True) if name.endswith(".ckpt")}
    files = sorted(checkpoints.values())  # last.ckpt may be a link to another one
    if len(files) == 1:
        return recognise_checkpoint(path / files[0])
    if files:
        raise UnreadableForeign(f"{path} holds {len(files)} checkpoints of Lightning. Name one, such as {files[-1]}.")
    raise UnreadableForeign(
        f"{path} holds no checkpoint that is known ({', '.join(sorted(names)[:5])}). Known are {_SUPPORTED}."
    )


def _newest(path: Path, names: set[str]) -> tuple[str | None, list[str]]:
    """Return the newest step that holds any file, else the newest, and what is to be said of newer ones."""
    steps = {int(match[1]): name for name in names if (match := re.match(r"^(?:checkpoint|step)-(\d+)$", name))}
    if not steps:
        return None, []
    filled = [step for step, name in steps.items() if holds_something(path / name)]
    newest_filled, newest = steps[max(filled or steps)], steps[max(steps)]
    return newest_filled, [] if newest_filled == newest else [
        f"{newest} is empty: a save that was cut off; {newest_filled} is the one before"
    ]


def _refuse_deepspeed(path: Path, names: set[str]) -> None:
    steps = [name for name in names if STEP_FOLDER.match(name.replace("global_step", "global_step_", 1))]
    inner = {entry.name for name in steps[:1] for entry in (path / name).iterdir()} if "latest" in names else set()
    if any(_DEEPSPEED.match(name) for name in names | inner):
        root = path if "latest" in names else path.parent
        command = f"python -m deepspeed.utils.zero_to_fp32 {root} OUT --safe_serialization"
        raise UnreadableForeign(
            f"{path} is a checkpoint of DeepSpeed, whose pickles ask for its own classes and are not opened. Its own "
            f"converter writes the weights: `{command}`, with the DeepSpeed that is installed; the copy of it in the "
            "directory is code from wherever that is from, and both open the pickles. Then `holdfast checkpoint check "
            "OUT`. Its optimizer state is lost on that way."
        )
