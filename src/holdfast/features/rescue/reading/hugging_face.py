"""Reads model directories and safetensors files, which hold weights and no training state."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.features.rescue.reading.record import ForeignCheckpoint, StoredTensor, TensorPiece
from holdfast.files import REGULAR, file_kind
from holdfast.models.files.safetensors_files import read_header, weight_files
from holdfast.models.names import canonical_name


def is_hugging_face(names: set[str]) -> bool:
    """Return whether names in a directory are those of a model directory, or of weights alone."""
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def read_hugging_face(path: Path) -> ForeignCheckpoint:
    """Return what a model directory, or one file of safetensors, holds."""
    folder = path if path.is_dir() else path.parent
    checkpoint = ForeignCheckpoint("Hugging Face", "safetensors", path)
    checkpoint.model_files = folder if (folder / "config.json").is_file() else None
    if path.is_dir():
        add_safetensors(checkpoint, folder)
    else:
        _add_file(checkpoint, path)
    checkpoint.add("loss", "it holds weights only: no optimizer, schedule, step or random state")
    return checkpoint


def add_safetensors(checkpoint: ForeignCheckpoint, folder: Path) -> None:
    """Add the weights of a directory's files."""
    try:
        weight_map = weight_files(folder)
    except ModelError as error:
        if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
            checkpoint.add("damage", str(error))
        return
    checkpoint.is_in_model_order = False
    for path in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == path}
        _add_file(checkpoint, path, listed)


def _add_file(checkpoint: ForeignCheckpoint, path: Path, listed: set[str] | None = None) -> None:
    try:
        kind = file_kind(path)
        if kind != REGULAR:
            checkpoint.add("damage", f"{path.name} is {kind}")
            return
        headers = read_header(path)
    except (ModelError, OSError) as error:
        checkpoint.add("damage", str(error))
        return
    if listed is not None and (lacking := sorted(listed - set(headers))):
        checkpoint.add("damage", f"{path.name} lacks {lacking[0]}, which the index says it holds")
    if listed is not None and (unlisted := sorted(set(headers) - listed)):
        checkpoint.add("damage", f"{path.name} holds {unlisted[0]}, which the index says is elsewhere or nowhere")
    checkpoint.without_checksums.add(path.name)
    for name, header in headers.items():
        fill = partial(_fill, path, name)
        piece = TensorPiece((0,) * len(header.shape), header.shape, header.dtype, fill, path.name)
        stored = StoredTensor(header.shape, header.dtype, (piece,))
        checkpoint.add_weight(canonical_name(name), stored, f"{name} in {path.name}")


def _fill(path: Path, name: str, target: Tensor) -> None:
    with safe_open(path, framework="pt") as file:
        target.copy_(file.get_tensor(name))
