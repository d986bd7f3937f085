"""Checkpoints of Lightning: a DCP directory with meta.pt (sharded), or one .ckpt file.

    sharded   NAME.ckpt/ .metadata __R_0.distcp meta.pt
    full      NAME.ckpt: {state_dict, optimizer_states, lr_schedulers, epoch, global_step, loops}

Random state is in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.alignment import rename
from holdfast.features.rescue.reading.dcp_systems import add_contents
from holdfast.features.rescue.reading.parts import opened_file
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, Position, counted
from holdfast.features.rescue.reading.state_dicts import add_optimizer, add_weights
from holdfast.models.names import canonical_name

META = "meta.pt"
_NO_RANDOM = "Lightning saves no random state: dropout and shuffling begin anew"


def read_lightning(path: Path) -> ForeignCheckpoint:
    """Return the checkpoint at a path: a directory, or one file."""
    checkpoint = ForeignCheckpoint("Lightning", "sharded (DCP)" if path.is_dir() else "full (one file)", path)
    try:
        content = _sharded(checkpoint, path) if path.is_dir() else _full(checkpoint, path)
    except (DamagedFile, OSError) as error:
        checkpoint.add("damage", f"{path.name} {error}")
        return checkpoint
    if content is not None:
        _add_progress(checkpoint, content)
    strip_attribute(checkpoint)
    if not checkpoint.has_optimizer:
        checkpoint.add(
            "loss",
            "it was saved with save_weights_only: Lightning's own resume ends with a KeyError or a missing key, after "
            "it has overwritten the model (report 003); here it begins a new run",
        )
    checkpoint.add("loss", _NO_RANDOM)
    return checkpoint


def _sharded(checkpoint: ForeignCheckpoint, folder: Path) -> Mapping[str, Any] | None:
    content: Mapping[str, Any] | None = None
    try:
        content = opened_file(checkpoint, folder / META).value()
    except (DamagedFile, OSError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else str(error)
        checkpoint.add("damage", f"{META} {reason}")
    add_contents(checkpoint, folder)
    return content


def _full(checkpoint: ForeignCheckpoint, path: Path) -> Mapping[str, Any]:
    file = opened_file(checkpoint, path)
    content = file.value()
    if not isinstance(content, dict) or "state_dict" not in content:
        raise DamagedFile("holds no state_dict, so it is none of Lightning's")
    add_weights(checkpoint, [(file, content["state_dict"])])
    states = content.get("optimizer_states") or []
    if len(states) > 1:
        checkpoint.add(
            "loss", f"it holds the states of {len(states)} optimizers, and only the first is read", there=False
        )
    if states:
        checkpoint.has_optimizer = True
        add_optimizer(checkpoint, [(file, states[0])])
    return content


def _add_progress(checkpoint: ForeignCheckpoint, content: Mapping[str, Any]) -> None:
    with checkpoint.naming(checkpoint.path.name):
        step = content.get("global_step")
        checkpoint.step = None if step is None else counted(step, "global_step")
    schedules = content.get("lr_schedulers") or []
    if schedules and isinstance(schedules[0], dict):
        checkpoint.schedule = schedules[0]
    try:
        current = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        ended = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
        epoch, ready = counted(content["epoch"], "epoch"), counted(current["ready"], "the number of batches")
        checkpoint.position = Position(epoch + 1, batches=0) if ended else Position(epoch, batches=ready)
    except DamagedFile as error:
        checkpoint.add("damage", f"{checkpoint.path.name} {error}")
    except (KeyError, TypeError, ValueError):
        checkpoint.position = None


def strip_attribute(checkpoint: ForeignCheckpoint) -> None:
    """Take the name of the module's attribute, such as `model.`, off all names, where the model stands in one."""
    names = list(checkpoint.weights)
    first = names[0].partition(".")[0] + "." if names else ""
    inner = {name.removeprefix(first).partition(".")[0] for name in names}
    if not names or not all(name.startswith(first) for name in names) or not inner & _OF_MODELS:
        return

    rename(checkpoint, lambda name: canonical_name(name.removeprefix(first)))


_OF_MODELS = {"model", "base_model", "lm_head", "transformer", "gpt_neox", "backbone", "language_model", "score"}
"""First parts of the names that transformers' own models have, or peft's around them."""
