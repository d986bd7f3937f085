"""Read chunks of tensors from their files, comparing each with its hash in the pass that copies it.

A rank that resumes in the sharding in which the checkpoint was saved needs the chunks of one file, and reads that file
once from start to end. At another number of ranks it reads every chunk that it needs a part of. What no rank needs is
distributed over the ranks and only compared, so that every byte of a checkpoint is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from torch import Tensor

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable, TensorsDiffer
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.shards import Piece, Stored, hashes_of, layouts_of, overlap
from holdfast.checkpoint.format.snapshot import chunk_of, like
from holdfast.checkpoint.format.verification import (
    check_headers,
    other_each_time,
    patiently,
    verified_manifest,
)
from holdfast.checkpoint.loading.matching import Target
from holdfast.checkpoint.place.hashing import hash_range, hash_tensor
from holdfast.checkpoint.place.memory import memory_for, memory_of, new_memory
from holdfast.checkpoint.place.storage import Storage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of the part of a tensor that a rank holds."""
Memory = Callable[[Piece], Tensor | None]
"""Returns contiguous memory for a chunk; None for one whose hash alone is compared."""
Take = Callable[[Piece, Tensor | None], object]
"""Is given each chunk that a rank needs, after its hash was compared."""


class _Doubtful(Exception):  # noqa: N818 - says what happened
    """A file could not be read, or its bytes are not those that were saved."""


class ChunkReader:
    """Reads the chunks of one checkpoint, whose file names and sizes have been verified; all ranks call it together."""

    def __init__(self, storage: Storage, name: str, manifest: Manifest, ranks: RankGroup) -> None:
        self._storage, self._name, self._manifest, self._ranks = storage, name, manifest, ranks
        self._layouts, self._hashes = layouts_of(manifest), hashes_of(manifest)

    def read(self, boxes: Mapping[str, Box], memory: Memory, take: Take) -> None:
        """Read the chunks that this rank needs a part of, and compare all others together with the other ranks.

        Args:
            boxes: The part of each tensor that this rank needs, by the tensor's stored name.
            memory, take: What chunks are read into, and what becomes of them.

        Raises:
            CheckpointCorrupt: Two reads give the same bytes, which are not those that were saved; on all ranks.
            CheckpointUnreadable: A file cannot be read, also after some patience, is another one each time, or this
                machine is short of memory; on all ranks.
        """
        chunks = self._chunks(boxes)
        is_read = False
        with suppress(_Doubtful):
            self._read_once(chunks, memory, take)
            is_read = True
        if all(self._ranks.gather(is_read)):
            return
        verified_manifest(self._storage, self._name, self._ranks)  # reads every file twice, and names a damaged one
        with self._ranks.together():
            self._read_again(chunks, memory, take)

    def _chunks(self, boxes: Mapping[str, Box]) -> dict[str, list[tuple[Stored, bool]]]:
        """Return the chunks that this rank reads, by file, and whether it needs them.

        A rank reads whole the files of which it needs the most, and a share of those that no rank needs. Of other files
        it reads what it needs.
        """

        def is_needed(piece: Piece) -> bool:
            box = boxes.get(piece.key)
            return box is not None and overlap(*box, piece.offsets, piece.sizes) is not None

        all_chunks = {
            file: [(stored, is_needed(stored.piece)) for stored in layout.chunks]
            for file, layout in self._layouts.items()
        }
        sizes = {
            file: sum(stored.piece.bytes_ for stored, needed in chunks if needed) for file, chunks in all_chunks.items()
        }
        owned = self._owned(sizes)
        needed = {
            file: [(stored, True) for stored, is_wanted in chunks if is_wanted] for file, chunks in all_chunks.items()
        }
        return {
            file: all_chunks.get(file, []) if file in owned else needed[file]
            for file in sorted(self._manifest.files)
            if file in owned or needed.get(file)
        }

    def _owned(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the files that this rank reads whole, given the bytes that it needs of each."""
        by_rank = self._ranks.gather(sizes)
        owned = set()
        for number, file in enumerate(sorted(self._manifest.files)):
            needs = [theirs.get(file, 0) for theirs in by_rank]
            who = needs.index(max(needs)) if any(needs) else number % self._ranks.size
            if who == self._ranks.rank:
                owned.add(file)
        return owned

    def _read_once(self, chunks: Mapping[str, list[tuple[Stored, bool]]], memory: Memory, take: Take) -> None:
        """Read all files from start to end.

        Raises:
            _Doubtful: Something cannot be read, or has another hash.
        """
        for file, file_chunks in chunks.items():
            path = f"{self._name}/{file}"
            try:
                if file not in self._layouts:
                    if self._storage.hash(path) != self._manifest.files[file].hash:
                        raise _Doubtful
                    continue
                header = self._layouts[file].header
                with self._storage.open(path) as stream:
                    if stream.read(len(header)) != header:
                        raise _Doubtful
                    for stored, needed in file_chunks:
                        tensor = memory(stored.piece) if needed else None
                        if self._copied(stream, stored, tensor) != self._hashes[file, stored.piece.key]:
                            raise _Doubtful
                        if needed:
                            take(stored.piece, tensor)
            except (OSError, MemoryError, CheckpointUnreadable) as error:
                raise _Doubtful from error

    def _read_again(self, chunks: Mapping[str, list[tuple[Stored, bool]]], memory: Memory, take: Take) -> None:
        """Read the chunks of files whose hashes fit; one whose own hash does not fit is read twice."""
        check_headers(self._storage, self._name, self._manifest)
        for file, file_chunks in chunks.items():
            path = f"{self._name}/{file}"
            for stored, needed in file_chunks:
                tensor = memory(stored.piece) if needed else None
                self._compare(path, stored, tensor, self._hashes[file, stored.piece.key])
                if needed:
                    take(stored.piece, tensor)

    def _compare(self, path: str, stored: Stored, tensor: Tensor | None, expected: str) -> None:
        full_path = f"{self._storage.root}/{path}"

        def copied() -> str:
            with self._storage.open(path) as stream:
                return self._copied(stream, stored, tensor)

        hashes = set()
        for _ in range(2):
            hashes.add(patiently(full_path, copied))
            if expected in hashes:
                return
            patiently(full_path, lambda: self._storage.hash(path, from_disk=True))
        if len(hashes) > 1:
            raise other_each_time(full_path)
        raise TensorsDiffer(
            f"{self._storage.root}/{self._name}: {stored.piece.key} reads back differently from what was saved, "
            "although the hashes of the files fit."
        )

    @staticmethod
    def _copied(stream: IO[bytes], stored: Stored, tensor: Tensor | None) -> str:
        """Copy a chunk into a tensor's memory, and return the hash of what was copied."""
        into = None if tensor is None else memory_of(tensor)
        return hash_range(stream, stored.start, stored.piece.bytes_, into)


def read_targets(
    targets: Mapping[str, Target], storage: Storage, name: str, manifest: Manifest, ranks: RankGroup
) -> dict[str, Tensor]:
    """Return this rank's shard of every target, and verify every file of the checkpoint; all ranks call it together.

    Args:
        targets: The tensors to read, under the same names on every rank.
        storage, name, manifest: The checkpoint, whose file names and sizes have been verified.
        ranks: A separate process group.

    Raises:
        CheckpointCorrupt, CheckpointUnreadable: As `ChunkReader.read`.
    """
    path = f"{storage.root}/{name}"
    boxes = {key: chunk_of(target.live) for key, target in targets.items()}
    shards: dict[str, Tensor] = {}
    with ranks.together():
        for key, target in targets.items():
            shards[key] = like(target.live, new_memory(path, boxes[key][1], target.dtype))

    def memory(piece: Piece) -> Tensor:
        if boxes[piece.key] == (piece.offsets, piece.sizes):
            return local_part(shards[piece.key])
        return new_memory(path, piece.sizes, piece.dtype)

    def take(piece: Piece, chunk: Tensor | None) -> None:
        box = boxes[piece.key]
        if box != (piece.offsets, piece.sizes) and chunk is not None:
            shared = overlap(*box, piece.offsets, piece.sizes)
            assert shared is not None
            local_part(shards[piece.key])[_within(*shared, box[0])] = chunk[_within(*shared, piece.offsets)]

    ChunkReader(storage, name, manifest, ranks).read(boxes, memory, take)
    return shards


def _within(offsets: tuple[int, ...], sizes: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a part of a tensor in a chunk of the tensor that begins at `origin`."""
    return tuple(
        slice(offset - first, offset - first + size) for offset, size, first in zip(offsets, sizes, origin, strict=True)
    )


def check_read_back(
    storage: Storage, name: str, manifest: Manifest, tensors: Mapping[str, Tensor], ranks: RankGroup
) -> None:
    """Read every chunk of a checkpoint, and compare this rank's with its live tensors; nothing is kept in memory.

    Raises:
        CheckpointCorrupt: A tensor reads back differently; it is named, on all ranks.
        CheckpointUnreadable: As `ChunkReader.read`.
    """
    boxes = {key: chunk_of(live) for key, live in tensors.items()}
    expected: dict[str, str] = {}
    with ranks.together(), memory_for(f"{storage.root}/{name}"):
        expected |= {key: hash_tensor(local_part(live)) for key, live in tensors.items() if local_part(live).numel()}
    read: dict[str, str] = {}
    stored = [(key, chunk) for key, entry in manifest.tensors.items() for chunk in entry.chunks]
    hashes = {(key, chunk.offsets, chunk.sizes): chunk.hash for key, chunk in stored}

    def take(piece: Piece, _: Tensor | None) -> None:
        if boxes[piece.key] == (piece.offsets, piece.sizes):
            read[piece.key] = hashes[piece.key, piece.offsets, piece.sizes]

    ChunkReader(storage, name, manifest, ranks).read(boxes, lambda _: None, take)
    with ranks.together():
        different = next((key for key, digest in expected.items() if read.get(key) != digest), None)
        if different is not None:
            raise CheckpointCorrupt(f"{storage.root}/{name}: {different} reads back differently from what was saved.")
