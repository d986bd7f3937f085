"""Read shards directly from their files, in file order, so that loading and verifying is one pass.

A rank that resumes in the sharding in which the checkpoint was saved needs exactly the chunks of one file. It reads
that file once from start to end, hashes every byte, and keeps the chunks. Files that no rank needs are distributed over
the ranks and hashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from holdfast.checkpoint.errors import CheckpointUnreadable
from holdfast.checkpoint.format.dcp import read_dcp_metadata
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import chunk_of, like
from holdfast.checkpoint.format.stored_chunks import chunk_from
from holdfast.checkpoint.loading.matching import Target
from holdfast.checkpoint.place.hashing import HASH_BLOCK, hash_bytes, hash_tensor
from holdfast.checkpoint.place.layout import DCP, METADATA
from holdfast.checkpoint.place.storage import Storage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part


class _StoredChunk(NamedTuple):
    """One stored chunk in a file."""

    offset: int
    length: int
    key: str


class _ChunkDiffers(Exception):  # noqa: N818 - says what happened
    """A chunk could not be read, or its bytes are not those that were saved."""


def read_parts(
    targets: Mapping[str, Target], storage: Storage, name: str, manifest: Manifest, ranks: RankGroup
) -> dict[str, Tensor] | None:
    """Read the tensors whose saved chunks equal the live shards on every rank, and hash every file.

    All ranks call this together.

    Args:
        targets: The tensors to read, under the same names on every rank.
        storage, name, manifest: The checkpoint, whose file names and sizes have been verified.
        ranks: A separate process group.

    Returns:
        This rank's shards by name, each compared with the hash of its chunk. None, on all ranks, if anything could not
        be read or has another hash; the caller then verifies every file to name the fault.
    """
    resharded = [
        key for key, target in targets.items() if target.stored_hash is None and local_part(target.live).numel()
    ]
    resharded_anywhere = {key for rank_keys in ranks.gather(resharded) for key in rank_keys}
    direct = {key: target for key, target in targets.items() if key not in resharded_anywhere}
    shards: dict[str, Tensor] | None = None
    items: dict[str, list[_StoredChunk]] | None = None
    with suppress(_ChunkDiffers):
        items = _items(direct, storage, name, manifest)
    owned = _dealt(manifest, items, ranks)
    if items is not None:
        with suppress(_ChunkDiffers):
            shards = _read(direct, items, owned, storage, name, manifest)
    return None if any(ranks.gather(shards is None)) else shards


def _items(
    targets: Mapping[str, Target], storage: Storage, name: str, manifest: Manifest
) -> dict[str, list[_StoredChunk]]:
    """Return the stored chunks of the targets by file."""
    file = f"{DCP}/{METADATA}"
    try:
        data = storage.read(f"{name}/{file}")
        if file not in manifest.files or hash_bytes(data) != manifest.files[file].hash:
            raise _ChunkDiffers
        metadata = read_dcp_metadata(data, f"{storage.root}/{name}/{file}")
    except (OSError, MemoryError, CheckpointUnreadable) as error:
        raise _ChunkDiffers from error
    stored: dict[tuple[str, tuple[int, ...]], Any] = {
        (index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()
    }
    by_file: dict[str, list[_StoredChunk]] = {}
    for key, target in targets.items():
        if not local_part(target.live).numel():
            continue
        info = stored.get((key, chunk_of(target.live)[0]))
        if info is None:
            raise _ChunkDiffers
        data_file = f"{DCP}/{info.relative_path}"
        # A rank that trusted a length beyond the file would fail alone, while the others wait for it.
        if (
            data_file not in manifest.files
            or not 0 <= info.offset < info.offset + info.length <= manifest.files[data_file].size
        ):
            raise _ChunkDiffers
        by_file.setdefault(data_file, []).append(_StoredChunk(info.offset, info.length, key))
    return by_file


def _dealt(manifest: Manifest, items: Mapping[str, Sequence[_StoredChunk]] | None, ranks: RankGroup) -> set[str]:
    """Return the files that this rank hashes: those of which it needs the most bytes, and a share of the unneeded."""
    needs = ranks.gather({file: sum(item.length for item in file_items) for file, file_items in (items or {}).items()})
    owned = set()
    for number, file in enumerate(sorted(manifest.files)):
        most = max(need.get(file, 0) for need in needs)
        who = next(rank for rank, need in enumerate(needs) if need.get(file, 0) == most) if most else number
        if who % ranks.size == ranks.rank:
            owned.add(file)
    return owned


def _read(
    targets: Mapping[str, Target],
    items: Mapping[str, Sequence[_StoredChunk]],
    owned: set[str],
    storage: Storage,
    name: str,
    manifest: Manifest,
) -> dict[str, Tensor]:
    shards = {
        key: like(target.live, torch.empty(local_part(target.live).shape, dtype=target.dtype))
        for key, target in targets.items()
        if not local_part(target.live).numel()
    }
    for file in sorted({*items, *owned}):
        digest = xxhash.xxh3_128() if file in owned else None
        try:
            with storage.open(f"{name}/{file}") as stream:
                for key, data in _chunks(stream, sorted(items.get(file, ())), digest):
                    shards[key] = like(targets[key].live, _part(data, targets[key], f"{storage.root}/{name}/{file}"))
        except (OSError, MemoryError, CheckpointUnreadable) as error:
            raise _ChunkDiffers from error
        if digest is not None and digest.hexdigest() != manifest.files[file].hash:
            raise _ChunkDiffers
    return shards


def _chunks(stream: IO[bytes], items: Sequence[_StoredChunk], digest: Any) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of items in their order; with a digest, all bytes of the file pass through it.

    One buffer serves all items, since new memory for each of them would have to be cleared first.
    """
    position = 0
    buffer = memoryview(bytearray(max((item.length for item in items), default=0)))
    for item in items:
        if item.offset < position:
            raise _ChunkDiffers
        if digest is None:
            stream.seek(item.offset)
        else:
            _pass(stream, item.offset - position, digest)
        data = buffer[: _filled(stream, buffer[: item.length])]
        if digest is not None:
            digest.update(data)
        yield item.key, data
        position = item.offset + item.length
    if digest is not None:
        _pass(stream, None, digest)


def _filled(stream: IO[bytes], buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; return how many bytes there were."""
    done = 0
    while done < len(buffer) and (count := stream.readinto(buffer[done:])):  # type: ignore[attr-defined]
        done += count
    return done


def _pass(stream: IO[bytes], size: int | None, digest: Any) -> None:
    """Read and hash the next `size` bytes, or all remaining ones."""
    while size is None or size > 0:
        data = stream.read(HASH_BLOCK if size is None else min(size, HASH_BLOCK))
        if not data:
            return
        digest.update(data)
        size = None if size is None else size - len(data)


def _part(data: memoryview, target: Target, path: str) -> Tensor:
    shard = chunk_from(data, path)
    if shard is None or (shard.shape, shard.dtype) != (local_part(target.live).shape, target.dtype):
        raise _ChunkDiffers
    if hash_tensor(shard) != target.stored_hash:
        raise _ChunkDiffers
    return shard
