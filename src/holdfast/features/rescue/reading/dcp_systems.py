"""Readers for systems whose checkpoints are DCP directories; each system names the tensors in its own way.

accelerate, Trainer, TRL   pytorch_model_fsdp_0/: model.NAME; optimizer_0/: optimizer.state.NAME.KEY
Lightning                  NAME.ckpt/ with meta.pt: state_dict.NAME or model.NAME, optimizer_0.state.NAME.KEY
torchtitan                 step-N/: NAME, optimizer.state.NAME.KEY, optimizer.param_groups.NAME.KEY, train_state.step
plain DCP                  whatever its author chose: model.NAME and optim.state.NAME.KEY as a rule
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.dcp_directory import DcpDirectory
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StoredGroup, counted, plain_settings
from holdfast.models.names import canonical_name

_MODELS = {"model", "state_dict", "module", "model_state_dict"}
_OPTIMIZERS = {"optim", "optimizer", "optimizer_0", "optimizers", "optimizer_state_dict"}
_APART = {"lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "rng", "step", "epoch", "extra"}


def add_contents(checkpoint: ForeignCheckpoint, folder: Path) -> dict[str, Any]:
    """Add a directory's weights and optimizer states; return the small values beside them by their flat names.

    Raises:
        DamagedFile: There is no list of contents, or it is damaged.
    """
    directory = DcpDirectory(folder, checkpoint)
    groups: dict[str, dict[str, Any]] = {}
    small_values: dict[str, Any] = {}
    for name in directory:
        first, path = _key(directory, name)
        try:
            if first in _OPTIMIZERS:
                _add_to_optimizer(checkpoint, directory, name, path, groups)
            elif first in _APART or not directory.is_tensor(name):
                small_values[name] = _small(directory, name)
            else:
                checkpoint.add_weight(canonical_name(".".join(path)), directory.tensor(name), name)
        except DamagedFile as error:
            checkpoint.add("damage", f"{name} {error}")
    checkpoint.has_optimizer = checkpoint.has_optimizer or bool(checkpoint.states or groups)
    checkpoint.groups += _groups(groups)
    return small_values


def _key(directory: DcpDirectory, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the key at the top that something stands under, and the keys below it.

    A weight that stands at the top itself, as torchtitan's do, has its name below and no key.
    """
    keys = tuple(map(str, directory.keys_of[name]))
    if len(keys) == 1:
        first, _, inner_name = name.partition(".")
        if first in _OPTIMIZERS or first in _APART:
            return first, (inner_name,)
        return "", (name,)
    if keys[0] in _MODELS or keys[0] in _OPTIMIZERS or keys[0] in _APART:
        return keys[0], keys[1:]
    return "", keys


def _add_to_optimizer(
    checkpoint: ForeignCheckpoint,
    directory: DcpDirectory,
    name: str,
    path: tuple[str, ...],
    groups: dict[str, dict[str, Any]],
) -> None:
    """Add a state or a setting.

    Raises:
        DamagedFile: It cannot be read.
    """
    kind, _, state_key = ".".join(path).partition(".")
    owner, _, slot = state_key.rpartition(".")
    if kind == "state" and directory.is_tensor(name):
        checkpoint.states.setdefault(canonical_name(owner), {})[slot] = directory.tensor(name)
    elif kind == "param_groups" and not directory.is_tensor(name):
        groups.setdefault(owner, {})[slot] = directory.value(name)


def _small(directory: DcpDirectory, name: str) -> Any:
    """Return a value, or a small tensor as what it holds; None for larger ones.

    Raises:
        DamagedFile: It cannot be read.
    """
    if not directory.is_tensor(name):
        return directory.value(name)
    tensor = directory.tensor(name)
    return tensor.read().tolist() if tensor.nbytes <= 64 else None


def _groups(groups: Mapping[str, Mapping[str, Any]]) -> list[StoredGroup]:
    """Return groups that are numbered, or told by the names of parameters: of these, equal settings make a group."""
    if all(key.isdigit() for key in groups):
        ordered = sorted(groups.items(), key=lambda item: int(item[0]))
        return [
            StoredGroup(
                tuple(canonical_name(str(name)) for name in values.get("params") or ()),
                {key: value for key, value in values.items() if key != "params"},
            )
            for _, values in ordered
        ]
    alike: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name, settings in groups.items():
        alike.setdefault(plain_settings(settings), ([], settings))[0].append(canonical_name(name))
    return [StoredGroup(tuple(names), settings) for names, settings in alike.values()]


def read_plain(folder: Path) -> ForeignCheckpoint:
    """Return a checkpoint of torchtitan, or one that an author's own code wrote with DCP."""
    checkpoint = ForeignCheckpoint("plain DCP", "one DCP directory", folder)
    try:
        small_values = add_contents(checkpoint, folder)
    except DamagedFile as error:
        checkpoint.add("damage", f"{folder.name} {error}")
        return checkpoint
    step = small_values.get("step", small_values.get("train_state.step"))
    with checkpoint.naming(folder.name):
        checkpoint.step = counted(step, "its step") if isinstance(step, int | float) else None
    if "train_state.step" in small_values or any(name.startswith("dataloader.dp_rank_") for name in small_values):
        _of_titan(checkpoint, folder, small_values)
    else:
        checkpoint.add("loss", "no schedule that could be recognised is in it")
    if checkpoint.random_state is False:
        checkpoint.add("loss", "the state of random generators of each rank is not in it")
    return checkpoint


def _of_titan(checkpoint: ForeignCheckpoint, folder: Path, small_values: Mapping[str, Any]) -> None:
    checkpoint.system, checkpoint.form = "torchtitan", "one DCP directory per step"
    checkpoint.step_is_updates = True
    world = small_values.get("dataloader.world_size")
    checkpoint.world_size = world if isinstance(world, int) else None
    last = small_values.get("lr_scheduler.last_epoch")
    if isinstance(last, int):
        checkpoint.schedule = {"last_epoch": last}
    number = folder.name.rpartition("-")[2]
    if checkpoint.step is not None and number.isdigit() and int(number) != checkpoint.step:
        checkpoint.add("damage", f"the directory is called {folder.name}, what is in it is of step {checkpoint.step}")
    checkpoint.add(
        "loss",
        f"the data's position is a pickle in a pickle, for {world} ranks alone: torchtitan itself reads it at that "
        "number of ranks, here it is not read",
        there=False,
    )
