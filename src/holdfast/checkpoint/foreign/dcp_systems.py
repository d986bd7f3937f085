"""Checkpoints that are made of DCP directories, by the names that each system gives to what is in them.

    accelerate, Trainer, TRL   pytorch_model_fsdp_0/: model.NAME; optimizer_0/: optimizer.state.NAME.KEY
    Lightning                  NAME.ckpt/ with meta.pt: state_dict.NAME or model.NAME, optimizer_0.state.NAME.KEY
    torchtitan                 step-N/: NAME, optimizer.state.NAME.KEY, optimizer.param_groups.NAME.KEY, train_state.step
    plain DCP                  whatever its author chose: model.NAME and optim.state.NAME.KEY as a rule
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.foreign.dcp_directory import DcpDirectory
from holdfast.checkpoint.foreign.record import DamagedFile, ForeignCheckpoint, StoredGroup, StoredTensor

_STATE = re.compile(r"^(?:(optim|optimizer|optimizer_0|optimizers|optimizer_states)\.)state\.(.+)\.([^.]+)$")
_GROUP = re.compile(r"^(?:optim|optimizer|optimizer_0|optimizers|optimizer_states)\.param_groups\.(.+)\.([^.]+)$")
_MODEL = re.compile(r"^(model|state_dict|module|app\.model|model_state_dict)\.")
_OTHERS = re.compile(r"^(lr_scheduler|lr_schedulers|scheduler|dataloader|train_state|rng|random|step|epoch|app|seed)(\.|$)")


@dataclass(frozen=True)
class Read:
    """What a directory held besides weights and optimizer."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def add_model(checkpoint: ForeignCheckpoint, directory: DcpDirectory, names: Sequence[str] | None = None) -> None:
    """Add the weights of a directory, under canonical names.

    Args:
        checkpoint: Is added to.
        directory: Its names.
        names: Those that are weights; default: all tensors.
    """
    chosen = [name for name in directory if directory.is_tensor(name)] if names is None else list(names)
    for name in chosen:
        try:
            checkpoint.weights[plain_name(name, chosen)] = directory.tensor(name)
        except DamagedFile as error:
            checkpoint.add("damage", f"{name} {error}")


def plain_name(name: str, names: Sequence[str]) -> str:
    """Return a weight's name without the key that all weights of its checkpoint stand under."""
    match = _MODEL.match(name)
    if match is None or not all(other.startswith(match[0]) for other in names):
        return name
    return name.removeprefix(match[0])


def add_states(checkpoint: ForeignCheckpoint, directory: DcpDirectory) -> list[str]:
    """Add the states and groups of an optimizer by name; return the names of the directory that are something else."""
    groups: dict[str, dict[str, Any]] = {}
    others = []
    for name in directory:
        state, group = _STATE.match(name), _GROUP.match(name)
        try:
            if state is not None and directory.is_tensor(name):
                checkpoint.states.setdefault(state[2], {})[state[3]] = directory.tensor(name)
            elif group is not None and not directory.is_tensor(name):
                groups.setdefault(group[1], {})[group[2]] = directory.value(name)
            elif state is None and group is None:
                others.append(name)
        except DamagedFile as error:
            checkpoint.add("damage", f"{name} {error}")
    checkpoint.has_optimizer = bool(checkpoint.states or groups)
    checkpoint.groups = _groups(groups)
    return others


def _groups(groups: dict[str, dict[str, Any]]) -> list[StoredGroup]:
    """Return groups that are numbered, or told by the names of parameters, where settings of one group are alike."""
    if all(key.isdigit() for key in groups):
        return [
            StoredGroup(tuple(map(str, values.get("params") or ())), {k: v for k, v in values.items() if k != "params"})
            for _, values in sorted(groups.items(), key=lambda item: int(item[0]))
        ]
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, settings in groups.items():
        alike.setdefault(repr(sorted(settings.items())), ([], settings))[0].append(name)
    return [StoredGroup(tuple(names), settings) for names, settings in alike.values()]


def split_others(directory: DcpDirectory, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of weights, and the names of all that is neither a weight nor optimizer state."""
    tensors = [name for name in others if directory.is_tensor(name)]
    below = [name for name in tensors if _MODEL.match(name) and not _OTHERS.match(name)]
    under_key = [name for name in below if name.startswith(("state_dict.", "model_state_dict."))] or [
        name for name in below if name.startswith("model.")
    ]
    weights = [name for name in tensors if not _OTHERS.match(name)] if _stands_at_top(tensors) else under_key or below
    return weights, [name for name in others if name not in set(weights)]


def _stands_at_top(tensors: Sequence[str]) -> bool:
    """Return whether weights stand under their own names: beside those of the inner model there is a head."""
    return any(name.startswith(("lm_head.", "output.", "tok_embeddings.", "layers.")) for name in tensors)
