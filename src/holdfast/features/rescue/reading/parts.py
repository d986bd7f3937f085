"""Joins tensors whose shards lie in the files of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.features.rescue.reading.pickles import Sharded, is_plain
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


def joined_tensor(ranks: Sequence[tuple[TorchFile, Any]]) -> StoredTensor:
    """Return the tensor of which every rank holds a shard.

    Raises:
        DamagedFile: The shards cannot be of one tensor.
    """
    first = ranks[0][1]
    if is_plain(first):
        file, view = ranks[0]
        copies = tuple(stored_piece(copy_file, theirs) for copy_file, theirs in ranks[1:])
        if any(copy.sizes != view.shape for copy in copies):
            raise DamagedFile("has another shape on another rank")
        return StoredTensor(view.shape, view.dtype, (stored_piece(file, view),), copies)
    _refuse_unlike([shard for _, shard in ranks])
    if first.cut_dim is None:
        first_piece, *copy_pieces = (stored_piece(file, shard.local) for file, shard in ranks)
        if any(copy.sizes != first_piece.sizes for copy in copy_pieces):
            raise DamagedFile("has another shape on another rank")
        return StoredTensor(first.shape, first.dtype, (first_piece,), tuple(copy_pieces))
    if first.cut_axis is None:  # a ShardedTensor says where its parts begin
        pieces = [stored_piece(file, shard.local, shard.offsets) for file, shard in ranks if shard.local is not None]
        return StoredTensor(
            first.shape, first.dtype, tuple(sorted(pieces, key=lambda tensor_piece: tensor_piece.offsets))
        )
    return StoredTensor(first.shape, first.dtype, *_along_axis(ranks, first.cut_axis, first.cut_dim))


def _refuse_unlike(shards: Sequence[Any]) -> None:
    first = shards[0]
    if not all(isinstance(shard, Sharded) for shard in shards):
        raise DamagedFile("is a tensor on one rank and something else on another")
    if {(shard.shape, shard.dtype, shard.cut_dim) for shard in shards} != {(first.shape, first.dtype, first.cut_dim)}:
        raise DamagedFile("has another shape, dtype or cut on another rank")


def _along_axis(
    ranks: Sequence[tuple[TorchFile, Any]], axis: int, dim: int
) -> tuple[tuple[TensorPiece, ...], tuple[TensorPiece, ...]]:
    """Return the pieces of a tensor in the order of a mesh axis, and their copies over the other axes.

    Raises:
        DamagedFile: A shard is there twice, a file is another rank's, or copies are cut in other places.
    """
    copies: dict[tuple[int, ...], dict[int, TensorPiece]] = {}
    for number, (file, shard) in enumerate(ranks):
        coordinate = shard.coordinate or (number,)
        pieces = copies.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), {})
        if coordinate[axis] in pieces:
            raise DamagedFile(f"is there twice: {file.path.name} holds the part of another rank")
        pieces[coordinate[axis]] = stored_piece(file, shard.local)
    for pieces in copies.values():
        if sorted(pieces) != list(range(len(pieces))):
            raise DamagedFile(f"lacks a part: the files are those of ranks {sorted(pieces)} of the mesh")
    ordered = [[copies[place][index] for index in sorted(copies[place])] for place in sorted(copies)]
    return in_rows(ordered, dim)


def in_rows(
    copies: Sequence[Sequence[TensorPiece]], dim: int = 0
) -> tuple[tuple[TensorPiece, ...], tuple[TensorPiece, ...]]:
    """Return the pieces of the first copy and those of the others, each copy's one behind another.

    Raises:
        DamagedFile: Copies are cut in other places.
    """
    first, *others = (in_a_row(pieces, dim) for pieces in copies)
    places = [(piece.offsets, piece.sizes) for piece in first]
    if any([(piece.offsets, piece.sizes) for piece in other] != places for other in others):
        raise DamagedFile("is cut in other places in a copy on other ranks")
    return first, tuple(piece for other in others for piece in other)


def stored_piece(file: TorchFile, view: Any, offsets: tuple[int, ...] | None = None) -> TensorPiece:
    """Return the piece of a tensor that a file holds.

    Raises:
        DamagedFile: The file lacks its numbers.
    """
    if not is_plain(view):
        raise DamagedFile(f"is no tensor in {file.path.name}")
    file.check(view)
    start = offsets or (0,) * len(view.shape)
    return TensorPiece(start, view.shape, view.dtype, partial(file.fill, view), file.path.name)
