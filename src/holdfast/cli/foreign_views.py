"""What `holdfast checkpoint check` says of another system's checkpoint: for a person, and for a script."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.escaping import escaped
from holdfast.files import size_words

if TYPE_CHECKING:
    from holdfast.checkpoint.foreign.examine import Level
    from holdfast.checkpoint.foreign.record import ForeignCheckpoint

_MOST = 12
"""Findings of one kind that a person is shown; a script gets all."""


def checked(path: Path, level: Level) -> ForeignCheckpoint:
    """Return a checkpoint with all findings; nothing is written, and nothing in it is run.

    Raises:
        UnreadableForeign: The path holds no checkpoint that is known.
    """
    from holdfast.checkpoint.foreign.examine import examine
    from holdfast.checkpoint.foreign.recognise import open_foreign

    checkpoint = open_foreign(path)
    examine(checkpoint, level)
    return checkpoint


def summary(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    """Return what is known, JSON-ready."""
    weights = Counter(str(each.dtype).removeprefix("torch.") for each in checkpoint.weights.values())
    states = [state for slots in checkpoint.states.values() for state in slots.values()]
    position = checkpoint.position
    return {
        "system": checkpoint.system,
        "form": checkpoint.form,
        "path": str(checkpoint.path),
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "weights": {
            "tensors": len(checkpoint.weights),
            "bytes": sum(each.nbytes for each in checkpoint.weights.values()),
            "dtypes": dict(weights),
            "tied": dict(checkpoint.tied_away),
        },
        "optimizer": {
            "parameters": len(checkpoint.states),
            "keys": sorted({slot for slots in checkpoint.states.values() for slot in slots}),
            "bytes": sum(each.nbytes for each in states),
            "dtypes": dict(Counter(str(each.dtype).removeprefix("torch.") for each in states if each.shape)),
        }
        if checkpoint.has_optimizer
        else None,
        "schedule_step": (checkpoint.schedule or {}).get("last_epoch"),
        "random_state": checkpoint.random_state,
        "position": None
        if position is None
        else {key: value for key, value in vars(position).items() if value is not None},
        "configuration": None if checkpoint.model_files is None else str(checkpoint.model_files),
        "findings": [vars(each) for each in checkpoint.findings],
        "damaged": bool(checkpoint.of_kind("damage")),
    }


def as_json(checkpoint: ForeignCheckpoint) -> str:
    """Return the summary as JSON."""
    return json.dumps(summary(checkpoint), indent=2, default=str)


def lines(checkpoint: ForeignCheckpoint) -> Iterator[str]:
    """Yield what a person reads."""
    about = summary(checkpoint)
    ranks = "" if checkpoint.world_size is None else f", {checkpoint.world_size} ranks"
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    yield escaped(f"{checkpoint.path}: {checkpoint.system}{ranks}{step} ({checkpoint.form})")
    yield f"  weights    {_words(about['weights'], 'tensors')}"
    optimizer = about["optimizer"]
    if optimizer is not None:
        yield f"  optimizer  {_words(optimizer, 'parameters')}: {', '.join(optimizer['keys'])}"
    if optimizer is not None and (without := len(checkpoint.weights) - len(checkpoint.tied_away) - len(checkpoint.states)):
        yield f"             {without} weights have no state: frozen, buffers, or without a gradient so far"
    if about["schedule_step"] is not None:
        yield f"  schedule   at {about['schedule_step']}"
    for kind, heading in _HEADINGS.items():
        chosen = checkpoint.of_kind(kind)  # type: ignore[arg-type]
        for finding in chosen[:_MOST]:
            here = "" if kind != "loss" else " (there and here)" if finding.there else " (here)"
            yield escaped(f"  {heading:<10} {finding.text}{here}")
        if len(chosen) > _MOST:
            yield f"  {heading:<10} and {len(chosen) - _MOST} more (--json has all)"
    damage = len(checkpoint.of_kind("damage"))
    yield "whole" if not damage else f"damaged: {damage} finding{'s' if damage > 1 else ''}"


_HEADINGS = {"note": "note", "repair": "repaired", "loss": "lost", "damage": "DAMAGED"}
"""By kind of a finding, in the order in which they are told."""


def _words(about: dict[str, Any], what: str) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in about["dtypes"].items())
    return f"{about[what]} {what}, {size_words(about['bytes'])} ({dtypes})"
