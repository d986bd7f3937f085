"""Prints the result of `holdfast checkpoint check` on another system's checkpoint, for people or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.text.escaping import escaped

if TYPE_CHECKING:
    from torch import dtype

    from holdfast.features.rescue.importing.importing import ImportOptions
    from holdfast.features.rescue.reading.examine import ForeignLevel
    from holdfast.features.rescue.reading.record import FindingKind, ForeignCheckpoint, StoredTensor

_MOST = 12
"""Findings of one kind that a person is shown; a script gets all."""


def checked(path: Path, level: ForeignLevel, base: Path | None = None) -> ForeignCheckpoint:
    """Return a checkpoint with all findings; nothing is written, and nothing in it is run.

    Args:
        path: The checkpoint, or the run that holds it.
        level: headers, or every number.
        base: The model that its adapters began with, to be compared with.

    Raises:
        UnreadableForeign: The path holds no checkpoint that is known.
    """
    from holdfast.features.rescue.reading.examine import examine
    from holdfast.features.rescue.reading.merged_adapters import compare_with_base
    from holdfast.features.rescue.reading.recognise import open_foreign

    checkpoint = open_foreign(path)
    examine(checkpoint, level)
    if base is not None:
        compare_with_base(checkpoint, base)
    return checkpoint


def foreign_summary(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    """Return what is known, JSON-ready."""
    position = checkpoint.position
    return {
        "system": checkpoint.system,
        "form": checkpoint.form,
        "path": str(checkpoint.path),
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "weights": {
            "tensors": len(checkpoint.weights),
            **_sizes(checkpoint.weights.values()),
            "tied": dict(checkpoint.tied_away),
        },
        "optimizer": _optimizer(checkpoint) if checkpoint.has_optimizer else None,
        "schedule_step": (checkpoint.schedule or {}).get("last_epoch"),
        "random_state": checkpoint.random_state,
        "position": position and {key: value for key, value in vars(position).items() if value is not None},
        "configuration": checkpoint.model_files and str(checkpoint.model_files),
        "findings": [vars(finding) for finding in checkpoint.findings],
        "verdict": checkpoint.verdict,
        "damaged": checkpoint.verdict == "damaged",
    }


def _optimizer(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    states = [state for slots in checkpoint.states.values() for state in slots.values()]
    return {
        "parameters": len(checkpoint.states),
        "keys": sorted({slot for slots in checkpoint.states.values() for slot in slots}),
        **_sizes(states),
    }


def _sizes(tensors: Collection[StoredTensor]) -> dict[str, Any]:
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.shape)
    return {"bytes": sum(tensor.nbytes for tensor in tensors), "dtypes": dict(dtypes)}


def as_json(checkpoint: ForeignCheckpoint) -> str:
    """Return the summary as JSON."""
    return json.dumps(foreign_summary(checkpoint), indent=2, default=str)


def lines(checkpoint: ForeignCheckpoint) -> Iterator[str]:
    """Yield what a person reads."""
    about = foreign_summary(checkpoint)
    ranks = "" if checkpoint.world_size is None else f", {checkpoint.world_size} ranks"
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    yield escaped(f"{checkpoint.path}: {checkpoint.system}{ranks}{step} ({checkpoint.form})")
    yield f"  weights    {_tensor_summary(about['weights'], 'tensors')}"
    if (optimizer := about["optimizer"]) is not None:
        yield f"  optimizer  {_tensor_summary(optimizer, 'parameters')}: {', '.join(optimizer['keys'])}"
        without = len(checkpoint.weights) - len(checkpoint.tied_away) - len(checkpoint.states)
        if without and (checkpoint.states or not checkpoint.of_kind("damage")):
            yield f"             {without} weights have no state: frozen, buffers, or without a gradient so far"
    if about["schedule_step"] is not None:
        yield f"  schedule   at {about['schedule_step']}"
    for kind in _HEADINGS:
        yield from _findings(checkpoint, kind)
    yield _verdict(checkpoint)


def _verdict(checkpoint: ForeignCheckpoint) -> str:
    if checkpoint.verdict == "whole":
        tensors = [
            *checkpoint.weights.values(),
            *(tensor for slots in checkpoint.states.values() for tensor in slots.values()),
        ]
        return f"whole: {size_words(sum(tensor.nbytes for tensor in tensors))} of tensors agree with their checksums"
    findings = checkpoint.of_kind("damage" if checkpoint.verdict == "damaged" else "unverified")
    return f"{checkpoint.verdict}: {len(findings)} finding{'s' if len(findings) > 1 else ''}"


def _findings(checkpoint: ForeignCheckpoint, kind: FindingKind) -> Iterator[str]:
    findings = checkpoint.of_kind(kind)
    for finding in findings[:_MOST]:
        suffix = "" if kind != "loss" else " (there and here)" if finding.there else " (here)"
        yield escaped(f"  {_HEADINGS[kind]:<10} {finding.text}{suffix}")
    if len(findings) > _MOST:
        yield f"  {_HEADINGS[kind]:<10} and {len(findings) - _MOST} more (--json has all)"


_HEADINGS: dict[FindingKind, str] = {
    "note": "note",
    "repair": "repaired",
    "loss": "lost",
    "unverified": "unverified",
    "damage": "DAMAGED",
}
"""By kind of a finding, in the order in which they are told."""


def _tensor_summary(about: dict[str, Any], key: str) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in about["dtypes"].items())
    return f"{about[key]} {key}, {size_words(about['bytes'])} ({dtypes})"


def _undamaged(path: Path) -> ForeignCheckpoint:
    """Open a checkpoint that is to be imported.

    Raises:
        CheckpointCorrupt: It is damaged; the first findings are named.
    """
    from holdfast.checkpoint.errors import CheckpointCorrupt

    checkpoint = checked(path, "headers")
    damage = checkpoint.of_kind("damage")
    if damage:
        more = f"; and {len(damage) - 3} more" if len(damage) > 3 else ""
        raise CheckpointCorrupt(
            f"{checkpoint.path} is damaged: {'; '.join(finding.text for finding in damage[:3])}{more}. Nothing was "
            f"written. `holdfast checkpoint check {path}` tells all of it; import the step before."
        )
    return checkpoint


def export_checked(
    path: Path, directory: Path, model: Path | None, dtype: dtype | None, *, trust_rank_order: bool
) -> Iterator[str]:
    """Write a model directory and yield what to say."""
    from holdfast.features.rescue.export import export_foreign
    from holdfast.features.rescue.reading.rank_order import refuse_untold_order

    _refuse_inside(path, directory)
    checkpoint = _undamaged(path)
    if not trust_rank_order:
        refuse_untold_order(checkpoint, "weights")
    export_foreign(checkpoint, directory, model=model, dtype=dtype)
    yield from _repairs(checkpoint)
    yield f"{checkpoint.path} ({checkpoint.system}) is exported to {directory}"


def _refuse_inside(source: Path, target: Path) -> None:
    """Refuse to write into what is only read.

    Raises:
        ConfigError: The target lies in the source.
    """
    if source.is_dir() and target.absolute().resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} lies in {source}, which is read and never written. Name a place outside of it.")


def _repairs(checkpoint: ForeignCheckpoint) -> Iterator[str]:
    for finding in checkpoint.of_kind("repair"):
        yield escaped(f"repaired: {finding.text}")


def import_checked(path: Path, run: Path, options: ImportOptions) -> Iterator[str]:
    """Write a checkpoint of a run and yield what to say."""
    from holdfast.config.verbs.roots import load_run
    from holdfast.features.rescue.importing.importing import import_run
    from holdfast.parallel.mesh import joined_world
    from holdfast.training.directory import run_directory

    loaded = load_run(run, [])
    _refuse_inside(path, run_directory(loaded.config))
    checkpoint = _undamaged(path)
    with joined_world(loaded.config.launch) as world:
        imported = import_run(checkpoint, loaded.config, loaded.base, world, options)
    for finding in checkpoint.of_kind("loss"):
        yield escaped(f"lost: {finding.text}")
    yield from map(escaped, imported.notes)
    yield f"{checkpoint.path} ({checkpoint.system}) is {imported.path}"
    yield f"continue it: holdfast {loaded.config.verb} {run} {imported.override}".rstrip()
