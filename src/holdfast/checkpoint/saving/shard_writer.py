"""Write the chunks of tensors that a rank holds into its file, one after the other, hashed while they are written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from holdfast.checkpoint.format.manifest import Chunk, FileEntry, TensorEntry
from holdfast.checkpoint.format.shards import Piece, pieces_by_rank, shard_file, shard_layout
from holdfast.checkpoint.format.snapshot import Snapshot, chunk_of
from holdfast.checkpoint.format.unsupported_tensors import is_finite
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.checkpoint.place.memory import memory_of
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.saving.agreement import together_in_phase
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part


class WrittenShard(NamedTuple):
    """What one rank wrote, and what it holds."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    """The chunk that this rank holds of each tensor, whichever rank wrote it."""
    finite: bool
    """Whether no number in them is NaN or infinite."""
    seconds: float
    """Duration of the writes of this rank, without waits for others."""


def write_shards(snapshot: Snapshot, storage: Storage, staging: str, ranks: RankGroup) -> WrittenShard:
    """Write this rank's chunks of a snapshot; all ranks call this together.

    Of a chunk that several ranks hold, one writes its copy; all hash theirs, so that copies that differ are found.

    Args:
        snapshot: This rank's snapshot. Tensors that it reads from other files are read while earlier ones are written.
        storage, staging: Where the file is written.
        ranks: The group of ranks.

    Raises:
        SaveFailed: On all ranks.
    """
    boxes = {
        key: chunk_of(tensor)
        for key, tensor in snapshot.tensors.items()
        if local_part(tensor).numel() or not tensor.numel()
    }
    by_rank = pieces_by_rank(
        [
            {
                key: Piece(key, tuple(snapshot.tensors[key].shape), snapshot.tensors[key].dtype, *box)
                for key, box in theirs.items()
            }
            for theirs in ranks.gather(boxes)
        ]
    )
    files = {piece: shard_file(rank) for rank, pieces in enumerate(by_rank) for piece in pieces}
    layout = shard_layout(by_rank[ranks.rank])
    written: dict[str, FileEntry] = {}
    contents: dict[str, tuple[str, bool]] = {}
    seconds = 0.0
    with together_in_phase(ranks, "shards"):
        if layout.chunks:
            began = time.monotonic()
            name = shard_file(ranks.rank)
            with storage.create(f"{staging}/{name}") as file:
                file.write(layout.header)
                for key, content in _contents(snapshot, [stored.piece.key for stored in layout.chunks]):
                    contents[key] = content.hash, content.finite
                    file.write(memory_of(content.tensor))
                    del content  # the next tensor is read while this one has a name
            written[name] = FileEntry(file.bytes_written, file.hexdigest())
            seconds = time.monotonic() - began
        for key, content in _contents(snapshot, [key for key in boxes if key not in contents]):
            contents[key] = content.hash, content.finite
    tensors = _described(snapshot, boxes, contents, files)
    return WrittenShard(written, tensors, all(finite for _, finite in contents.values()), seconds)


def _described(
    snapshot: Snapshot,
    boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    contents: Mapping[str, tuple[str, bool]],
    files: Mapping[Piece, str],
) -> dict[str, TensorEntry]:
    """Return the manifest's entry of each tensor, with the chunk that this rank holds."""
    tensors = {}
    for key, tensor in snapshot.tensors.items():
        shape = tuple(tensor.shape)
        chunks: tuple[Chunk, ...] = ()
        if key in boxes:
            chunks = (Chunk(*boxes[key], contents[key][0], files[Piece(key, shape, tensor.dtype, *boxes[key])]),)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[key] = TensorEntry(shape, dtype, chunks, key in snapshot.trained)
    return tensors


class _Content(NamedTuple):
    """The memory that a rank holds of a tensor, on the host."""

    tensor: Tensor
    hash: str
    finite: bool


def _contents(snapshot: Snapshot, keys: Sequence[str]) -> Iterator[tuple[str, _Content]]:
    """Yield the contents of tensors; one that is read from another file is read while the one before is written."""
    if not snapshot.readers:
        for key in keys:
            yield key, _content(local_part(snapshot.tensors[key]))
        return
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(_read, snapshot, keys[0]) if keys else None
        for key, following in zip_longest(keys, keys[1:]):
            assert ahead is not None
            content, ahead = ahead.result(), None
            if following is not None:
                ahead = thread.submit(_read, snapshot, following)
            yield key, content
            del content


def _read(snapshot: Snapshot, key: str) -> _Content:
    """Read a tensor from another file.

    Raises:
        ValueError: Its shape or dtype is not the planned one.
    """
    tensor, planned = snapshot.readers[key](), snapshot.tensors[key]
    if tensor.shape != planned.shape or tensor.dtype != planned.dtype:
        raise ValueError(
            f"{key} reads as {list(tensor.shape)} {tensor.dtype}, {list(planned.shape)} {planned.dtype} was planned"
        )
    return _content(tensor)


def _content(tensor: Tensor) -> _Content:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _Content(host, hash_tensor(host), is_finite(host))
