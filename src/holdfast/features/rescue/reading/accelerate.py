"""Checkpoints of accelerate's `save_state`, of transformers' Trainer, and so of TRL's trainers, under FSDP.

    sharded   pytorch_model_fsdp_0/ optimizer_0/: DCP
    full      pytorch_model_fsdp.bin, optimizer.bin: one pickle each, states by parameter name
    beside    scheduler.bin random_states_R.pkl (accelerate); scheduler.pt rng_state_R.pth trainer_state.json (Trainer)

training_args.bin is a pickle of whatever class the arguments are; it is never opened.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.dcp_systems import add_contents
from holdfast.features.rescue.reading.hugging_face import add_safetensors
from holdfast.features.rescue.reading.parts import opened_file
from holdfast.features.rescue.reading.record import (
    TRAINER,
    DamagedFile,
    ForeignCheckpoint,
    Position,
    counted,
    refuse_outside,
)
from holdfast.features.rescue.reading.state_dicts import Rank, add_optimizer, add_weights
from holdfast.files import read_json

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
MODEL_FILE, OPTIMIZER_FILE = "pytorch_model_fsdp.bin", "optimizer.bin"
_RANDOM = re.compile(r"^(?:random_states_(\d{1,6})\.pkl|rng_state_(\d{1,6})\.pth)$")


_SECOND = re.compile(r"^(?:pytorch_model_fsdp|optimizer)_[1-9]\d*(?:\.bin)?$")


def is_accelerate(names: set[str]) -> bool:
    """Return whether names in a directory are those of such a checkpoint."""
    state_names = {MODEL_FOLDER, OPTIMIZER_FOLDER, MODEL_FILE, OPTIMIZER_FILE, "optimizer.pt"}
    progress_names = {"scheduler.bin", "scheduler.pt", "trainer_state.json"}
    return bool(names & state_names) and (bool(names & progress_names) or MODEL_FOLDER in names or MODEL_FILE in names)


def read_accelerate(folder: Path) -> ForeignCheckpoint:
    """Return the checkpoint in a directory."""
    names = {path.name for path in folder.iterdir()}
    trainer = "trainer_state.json" in names or "scheduler.pt" in names
    system = TRAINER if trainer else "accelerate"
    sharded = MODEL_FOLDER in names
    checkpoint = ForeignCheckpoint(system, "sharded (DCP)" if sharded else "full (one file)", folder)
    checkpoint.model_files = folder if "config.json" in names else None
    _refuse_two_models(checkpoint, names)
    _add_random(checkpoint, names)
    with checkpoint.naming(""):
        _add_weights(checkpoint, folder, names)
    with checkpoint.naming(""):
        _add_optimizer(checkpoint, folder, names)
    schedule = next((name for name in ("scheduler.pt", "scheduler.bin") if name in names), None)
    if schedule is None:
        checkpoint.add("loss", "there is no scheduler file: the schedule's place is not in it")
    else:
        with checkpoint.naming(schedule):
            _add_schedule(checkpoint, folder / schedule)
    if trainer:
        _add_trainer_state(checkpoint, folder / "trainer_state.json")
    else:
        _add_step(checkpoint)
    return checkpoint


def _refuse_two_models(checkpoint: ForeignCheckpoint, names: set[str]) -> None:
    second_names = sorted(name for name in names if _SECOND.match(name))
    if second_names:
        checkpoint.add(
            "damage", f"it holds two models or optimizers: {second_names[0]} beside those of number 0, and one is read"
        )
    if {MODEL_FOLDER, MODEL_FILE} <= names:
        checkpoint.add("damage", f"it holds its weights twice: {MODEL_FOLDER}/ and {MODEL_FILE} are of two saves")


def _add_weights(checkpoint: ForeignCheckpoint, folder: Path, names: set[str]) -> None:
    if MODEL_FOLDER in names:
        add_within(checkpoint, folder / MODEL_FOLDER)
    elif MODEL_FILE in names:
        add_weights(checkpoint, [_read(checkpoint, folder / MODEL_FILE)])
    else:
        add_safetensors(checkpoint, folder)
        return _require_weights(checkpoint)
    unread = sorted(name for name in names if name.endswith(".safetensors"))
    if unread:
        source = MODEL_FOLDER if MODEL_FOLDER in names else MODEL_FILE
        checkpoint.add("note", f"{', '.join(unread)} is not looked at: the weights are those of {source}")
    return _require_weights(checkpoint)


def _require_weights(checkpoint: ForeignCheckpoint) -> None:
    if not checkpoint.weights and not checkpoint.of_kind("damage"):
        checkpoint.add("damage", f"there are no weights: neither {MODEL_FOLDER}/, {MODEL_FILE} nor safetensors")


def add_within(checkpoint: ForeignCheckpoint, folder: Path) -> dict[str, Any]:
    """Add what a DCP directory below the checkpoint holds.

    Raises:
        DamagedFile: As `add_contents`, with the directory's name.
    """
    try:
        refuse_outside(folder, checkpoint.path)
        return add_contents(checkpoint, folder)
    except DamagedFile as error:
        raise DamagedFile(f"{folder.name} {error}") from None


def _read(checkpoint: ForeignCheckpoint, path: Path) -> Rank:
    try:
        file = opened_file(checkpoint, path)
        return file, file.value()
    except DamagedFile as error:
        raise DamagedFile(f"{path.name} {error}") from None


def _add_optimizer(checkpoint: ForeignCheckpoint, folder: Path, names: set[str]) -> None:
    if OPTIMIZER_FOLDER in names:
        checkpoint.has_optimizer = True
        add_within(checkpoint, folder / OPTIMIZER_FOLDER)
    elif OPTIMIZER_FILE in names or "optimizer.pt" in names:
        name = OPTIMIZER_FILE if OPTIMIZER_FILE in names else "optimizer.pt"
        checkpoint.has_optimizer = True
        add_optimizer(checkpoint, [_read(checkpoint, folder / name)])


def _add_schedule(checkpoint: ForeignCheckpoint, path: Path) -> None:
    content = opened_file(checkpoint, path).value()
    if not isinstance(content, dict):
        raise DamagedFile("holds no state of a schedule")
    counted(content.get("last_epoch"), "the step of the schedule")
    checkpoint.schedule = content


_OF_ONE_RANK = "rng_state.pth"
"""What the Trainer calls the random state of a run that has one process."""


def _add_random(checkpoint: ForeignCheckpoint, names: set[str]) -> None:
    ranks = sorted(int(match[1] or match[2]) for name in names if (match := _RANDOM.match(name)))
    if not ranks and _OF_ONE_RANK in names:
        ranks = [0]
    if not ranks:
        checkpoint.add("loss", "there are no files of random state")
        return
    checkpoint.world_size, checkpoint.random_state = ranks[-1] + 1, True
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        checkpoint.add("damage", f"random state of rank {', '.join(map(str, missing))} is missing")


def _add_step(checkpoint: ForeignCheckpoint) -> None:
    """Count updates by the optimizer: accelerate's schedule counts one for every rank, unless it splits batches."""
    last = (checkpoint.schedule or {}).get("last_epoch")
    checkpoint.step = last
    counter = next((slots["step"] for slots in checkpoint.states.values() if "step" in slots), None)
    if counter is None:
        return
    with checkpoint.naming(counter.pieces[0].file):
        number = counter.read().item() if math.prod(counter.shape) == 1 else None
        checkpoint.step = counted(number, "the optimizer's step")
    if last not in {None, checkpoint.step}:
        message = (
            f"accelerate's schedule stands at {last}, one for each rank and update; {checkpoint.step} updates were made"
        )
        checkpoint.add("note", message)


def _add_trainer_state(checkpoint: ForeignCheckpoint, path: Path) -> None:
    if not path.is_file():
        checkpoint.add("damage", "trainer_state.json is missing: the step and the position in the data are in it")
        return
    try:
        refuse_outside(path, path.parent)
        values = read_json(path)
        checkpoint.step = counted(values["global_step"], "global_step")
        epoch = float(values["epoch"])
        passes = counted(float(math.floor(epoch)), "epoch")
    except DamagedFile as error:
        checkpoint.add("damage", f"trainer_state.json {error}")
        return
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        checkpoint.add("damage", f"trainer_state.json cannot be read: {error}")
        return
    checkpoint.step_is_updates = True
    checkpoint.position = Position(passes, share=epoch - passes)
    folder = re.match(r"^checkpoint-(\d+)$", path.parent.name)
    if folder and int(folder[1]) != checkpoint.step:
        checkpoint.add("damage", f"the directory is called {path.parent.name}, trainer_state.json is of step "
                                 f"{checkpoint.step}")  # fmt: skip
    last = (checkpoint.schedule or {}).get("last_epoch")
    if last is not None and last != checkpoint.step:
        checkpoint.add("damage", f"trainer_state.json is of step {checkpoint.step}, the schedule of step {last}")
