"""Tensors of parts that lie in the files of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.pickles import Sharded, StoredView
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StoredTensor, TensorPiece, in_a_row
from holdfast.features.rescue.reading.torch_file import TorchFile


def opened_file(
    checkpoint: ForeignCheckpoint, path: Path, begin: int = 0, length: int | None = None, within: Path | None = None
) -> TorchFile:
    """Return a file of a checkpoint; one without checksums is noted.

    Args:
        checkpoint: Its own.
        path: The file.
        begin: As `TorchFile`.
        length: As `TorchFile`.
        within: As `TorchFile`; default: the checkpoint, where that is a directory.

    Raises:
        DamagedFile: As `TorchFile`.
    """
    inside = checkpoint.path if within is None and checkpoint.path != path else within
    file = TorchFile(path, begin, length, inside)
    if not file.has_checksums:
        checkpoint.without_checksums.add(path.name)
    if length is None:
        checkpoint.compare_rest[path] = file.compare_rest
    return file


def whole(ranks: Sequence[tuple[TorchFile, Any]]) -> StoredTensor:
    """Return the tensor whose parts each rank holds one of.

    Raises:
        DamagedFile: The parts cannot be of one tensor.
    """
    first = ranks[0][1]
    if isinstance(first, StoredView):
        file, view = ranks[0]
        copies = tuple(piece(other, theirs) for other, theirs in ranks[1:])
        if any(copy.sizes != view.shape for copy in copies):
            raise DamagedFile("has another shape on another rank")
        return StoredTensor(view.shape, view.dtype, (piece(file, view),), copies)
    _refuse_unlike([part for _, part in ranks])
    if first.dim is None:
        own, *others = (piece(file, part.local) for file, part in ranks)
        return StoredTensor(first.shape, first.dtype, (own,), tuple(others))
    if first.cut_axis is None:  # a ShardedTensor says where its parts begin
        parts = [piece(file, part.local, part.offsets) for file, part in ranks if part.local is not None]
        return StoredTensor(first.shape, first.dtype, tuple(sorted(parts, key=lambda part: part.offsets)))
    return StoredTensor(first.shape, first.dtype, in_a_row(_along_axis(ranks, first.cut_axis), first.dim))


def _refuse_unlike(parts: Sequence[Any]) -> None:
    first = parts[0]
    if not all(isinstance(part, Sharded) for part in parts):
        raise DamagedFile("is a tensor on one rank and something else on another")
    if {(part.shape, part.dtype, part.dim) for part in parts} != {(first.shape, first.dtype, first.dim)}:
        raise DamagedFile("has another shape, dtype or cut on another rank")


def _along_axis(ranks: Sequence[tuple[TorchFile, Any]], axis: int) -> list[TensorPiece]:
    """Return the parts of a tensor in the order of a mesh axis; of copies over other axes, the first.

    Raises:
        DamagedFile: A part is there twice, or a file is another rank's.
    """
    parts: dict[int, TensorPiece] = {}
    places: set[tuple[int, ...]] = set()
    for number, (file, part) in enumerate(ranks):
        place = part.coordinate or (number,)
        if place in places:
            raise DamagedFile(f"is there twice: {file.path.name} holds the part of another rank")
        places.add(place)
        if not any(other for at, other in enumerate(place) if at != axis):
            parts[place[axis]] = piece(file, part.local)
    if sorted(parts) != list(range(len(parts))):
        raise DamagedFile(f"lacks a part: the files are those of ranks {sorted(parts)} of the mesh")
    return [parts[place] for place in sorted(parts)]


def piece(file: TorchFile, view: Any, offsets: tuple[int, ...] | None = None) -> TensorPiece:
    """Return a part of a tensor that a file holds.

    Raises:
        DamagedFile: The file lacks its numbers.
    """
    if not isinstance(view, StoredView):
        raise DamagedFile(f"is no tensor in {file.path.name}")
    file.check(view)
    place = offsets or (0,) * len(view.shape)
    return TensorPiece(place, view.shape, view.dtype, partial(file.fill, view), file.path.name)
