"""Finds out whether low-rank adapters were already merged into a checkpoint's weights, by comparison with the base.

A merge adds scale * B A to a matrix and should happen once. What a checkpoint's matrices have beyond the base is
measured along that direction, over all adapted matrices: 0 times, once or twice. Nothing is repaired: subtracting would
not give back what rounding took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.features.rescue.reading.hugging_face import read_hugging_face
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StoredTensor, UnreadableForeign
from holdfast.files import read_json
from holdfast.models.names import canonical_name

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
_FOLDERS = ("", "lora_adapter")
"""Where adapters lie beside weights: peft's own place, and verl's."""
_FILE, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_NEAR = 0.15
"""How far a count of merges may be from a whole number: bfloat16 rounds a small update away in part."""


class _Adapters(NamedTuple):
    """Low-rank adapters by the name of the layer that they adapt."""

    pairs: Mapping[str, tuple[StoredTensor, StoredTensor]]
    scales: Mapping[str, float] | None
    """The factor of B A; None where no file states it."""
    apart: bool
    """Whether they lie in a directory from which no loader adds them automatically."""


def compare_with_base(checkpoint: ForeignCheckpoint, base: Path) -> None:
    """Add to a checkpoint's findings how often its adapters were merged.

    Args:
        checkpoint: With adapters among its weights, or with peft's files beside them.
        base: The model directory that the adapters were trained on.

    Raises:
        UnreadableForeign: The base is no model directory.
    """
    adapters = _adapters_of(checkpoint)
    if adapters is None:
        checkpoint.add("note", "it has no adapters, so there is nothing that was merged")
        return
    weights = read_hugging_face(base).weights if base.is_dir() else {}
    if not weights:
        raise UnreadableForeign(f"{base} holds no weights to compare with: --base names a model directory.")
    try:
        merges = _merge_count(checkpoint, adapters, weights)
    except (DamagedFile, OSError) as error:
        checkpoint.add("damage", f"its adapters cannot be compared with {base}: a file {error}")
        return
    if merges is None:
        checkpoint.add("note", f"none of its adapted matrices is in {base}, so nobody can say what was merged")
        return
    _add_finding(checkpoint, adapters, merges, base)


def _add_finding(checkpoint: ForeignCheckpoint, adapters: _Adapters, merges: float, base: Path) -> None:
    count, layers = round(merges), f"{len(adapters.pairs)} adapted matrices"
    again = "; whoever loads both adds them again" if not adapters.apart else ""
    if adapters.scales is None and abs(merges) > _NEAR:
        checkpoint.add(
            "damage",
            f"its adapters were merged already: its {layers} are those of {base} and {merges:.2f} B A, and the "
            f"adapters are there too{again}. Take its weights without the adapters, or the adapters on the base; this "
            "is not repaired",
        )
    elif abs(merges - count) > _NEAR or count < 0:
        checkpoint.add("note", f"its {layers} differ from {base} by more than its adapters: trained, or another base")
    elif count > 1:
        checkpoint.add(
            "damage",
            f"its adapters were merged {'twice' if count == 2 else f'{count} times'}: its {layers} are those of {base} "
            f"and {merges:.2f} times the adapters. Merge them once into the base; this is not repaired, since rounding "
            "took digits",
        )
    elif count == 1 and not adapters.apart:
        checkpoint.add(
            "damage", f"its adapters were merged already, and lie beside the weights{again}. Take one of the two"
        )
    else:
        checkpoint.add("note", f"its adapters were merged {'once' if count else 'not at all'}, compared with {base}")


def _merge_count(checkpoint: ForeignCheckpoint, adapters: _Adapters, base: Mapping[str, StoredTensor]) -> float | None:
    """Return how often the adapters are in the weights: least squares over all matrices, one in memory at a time."""
    product = square = 0.0
    weights = _plain(checkpoint.weights)
    for layer, (a, b) in adapters.pairs.items():
        name = f"{layer}.weight"
        theirs, ours = base.get(name), weights.get(name)
        if theirs is None or ours is None or theirs.shape != ours.shape:
            continue
        scale = 1.0 if adapters.scales is None else adapters.scales[layer]
        update = scale * (_wide(b) @ _wide(a))
        if update.shape != ours.shape:  # a transposed matrix, as GPT-2's
            update = update.T
        product += float(((_wide(ours) - _wide(theirs)) * update).sum())
        square += float((update * update).sum())
    return product / square if square else None


def _wide(tensor: StoredTensor) -> Tensor:
    return tensor.read().to(torch.float64)


def _adapters_of(checkpoint: ForeignCheckpoint) -> _Adapters | None:
    """Return the adapters among a checkpoint's weights, or those of peft's files beside them."""
    inline = dict(_pairs(checkpoint.weights))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for name in _FOLDERS:
        directory = folder / name
        if not (directory / _FILE).is_file():
            continue
        pairs = inline or dict(_pairs(read_hugging_face(directory / _FILE).weights))
        return (
            _Adapters(pairs, _scales(directory / _SETTINGS, pairs), apart=bool(name) and not inline) if pairs else None
        )
    return _Adapters(inline, None, apart=False) if inline else None


def _plain(weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {canonical_name(name.removeprefix(_PREFIX)): value for name, value in weights.items()}


def _pairs(weights: Mapping[str, StoredTensor]) -> Iterator[tuple[str, tuple[StoredTensor, StoredTensor]]]:
    names = _plain(weights)
    for name, value in names.items():
        layer = name.removesuffix(_A)
        if layer != name and layer + _B in names:
            yield layer, (value, names[layer + _B])


def _scales(settings: Path, pairs: Mapping[str, tuple[StoredTensor, StoredTensor]]) -> dict[str, float] | None:
    try:
        values: dict[str, Any] = read_json(settings)
        alpha, patterns = float(values["lora_alpha"]), values.get("alpha_pattern") or {}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if patterns:
        return None
    rank = {layer: a.shape[0] for layer, (a, _) in pairs.items()}
    root = bool(values.get("use_rslora"))
    return {layer: alpha / (math.sqrt(size) if root else size) for layer, size in rank.items()}
