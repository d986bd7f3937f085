"""Parts of tensors read straight from their files, in the order they lie there: verifying and loading is one pass.

A rank that resumes in the sharding it was saved in wants exactly the chunks of one file. It reads that file once, from
end to end, hashes every byte on the way, and keeps the chunks. Files that nobody wants are dealt out and hashed.
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


class _Item(NamedTuple):
    """One stored chunk in a file."""

    offset: int
    length: int
    key: str


class _Differs(Exception):  # noqa: N818 - says what happened
    """Bytes are not those that were saved, or could not be read."""


def read_parts(
    targets: Mapping[str, Target],
    storage: Storage,
    name: str,
    manifest: Manifest,
    ranks: RankGroup,
    *,
    verify: bool,
) -> dict[str, Tensor] | None:
    """Return the parts that were saved as every rank wants them, in the live sharding; all ranks call this together.

    Args:
        targets: What parts are read into; the same names on every rank.
        storage, name, manifest: The checkpoint, its names verified.
        ranks: A group of its own.
        verify: Compare the hash of every file of the checkpoint too.

    Returns:
        Parts by name, each compared with the hash of its chunk; None, on all ranks, if any byte of what was read is in
        doubt. The caller then verifies every file, which names the fault.
    """
    other = [key for key, each in targets.items() if each.stored_hash is None and local_part(each.live).numel()]
    left = {key for part in ranks.gather(other) for key in part}
    direct = {key: each for key, each in targets.items() if key not in left}
    parts: dict[str, Tensor] | None = None
    items: dict[str, list[_Item]] | None = None
    with suppress(_Differs):
        items = _items(direct, storage, name, manifest)
    owned = _dealt(manifest, items, ranks) if verify else set()
    if items is not None:
        with suppress(_Differs):
            parts = _read(direct, items, owned, storage, name, manifest)
    return None if any(ranks.gather(parts is None)) else parts


def _items(targets: Mapping[str, Target], storage: Storage, name: str, manifest: Manifest) -> dict[str, list[_Item]]:
    """Return where the chunks of targets lie, by file."""
    file = f"{DCP}/{METADATA}"
    try:
        data = storage.read(f"{name}/{file}")
        if file not in manifest.files or hash_bytes(data) != manifest.files[file].hash:
            raise _Differs
        metadata = read_dcp_metadata(data, f"{storage.root}/{name}/{file}")
    except (OSError, MemoryError, CheckpointUnreadable) as error:
        raise _Differs from error
    stored: dict[tuple[str, tuple[int, ...]], Any] = {
        (index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()
    }
    by_file: dict[str, list[_Item]] = {}
    for key, each in targets.items():
        if not local_part(each.live).numel():
            continue
        info = stored.get((key, chunk_of(each.live)[0]))
        if info is None:
            raise _Differs
        place = f"{DCP}/{info.relative_path}"
        # A rank that trusted a length beyond the file would fail alone, while the others wait for it.
        if (
            place not in manifest.files
            or not 0 <= info.offset < info.offset + info.length <= manifest.files[place].size
        ):
            raise _Differs
        by_file.setdefault(place, []).append(_Item(info.offset, info.length, key))
    return by_file


def _dealt(manifest: Manifest, items: Mapping[str, Sequence[_Item]] | None, ranks: RankGroup) -> set[str]:
    """Return the files that this rank hashes: those it wants most of, and its share of what nobody wants."""
    needs = ranks.gather({file: sum(item.length for item in each) for file, each in (items or {}).items()})
    owned = set()
    for number, file in enumerate(sorted(manifest.files)):
        most = max(need.get(file, 0) for need in needs)
        who = next(rank for rank, need in enumerate(needs) if need.get(file, 0) == most) if most else number
        if who % ranks.size == ranks.rank:
            owned.add(file)
    return owned


def _read(
    targets: Mapping[str, Target],
    items: Mapping[str, Sequence[_Item]],
    owned: set[str],
    storage: Storage,
    name: str,
    manifest: Manifest,
) -> dict[str, Tensor]:
    parts = {
        key: like(each.live, torch.empty(local_part(each.live).shape, dtype=each.dtype))
        for key, each in targets.items()
        if not local_part(each.live).numel()
    }
    for file in sorted({*items, *owned}):
        digest = xxhash.xxh3_128() if file in owned else None
        try:
            with storage.open(f"{name}/{file}") as stream:
                for key, data in _chunks(stream, sorted(items.get(file, ())), digest):
                    parts[key] = like(targets[key].live, _part(data, targets[key], f"{storage.root}/{name}/{file}"))
        except (OSError, MemoryError, CheckpointUnreadable) as error:
            raise _Differs from error
        if digest is not None and digest.hexdigest() != manifest.files[file].hash:
            raise _Differs
    return parts


def _chunks(stream: IO[bytes], items: Sequence[_Item], digest: Any) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of items in their order; with a digest, all bytes of the file pass through it.

    One buffer serves all items, since new memory for each of them would have to be cleared first.
    """
    position = 0
    buffer = memoryview(bytearray(max((item.length for item in items), default=0)))
    for item in items:
        if item.offset < position:
            raise _Differs
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
    """Hash the next bytes, or all that are left."""
    while size is None or size > 0:
        data = stream.read(HASH_BLOCK if size is None else min(size, HASH_BLOCK))
        if not data:
            return
        digest.update(data)
        size = None if size is None else size - len(data)


def _part(data: memoryview, target: Target, where: str) -> Tensor:
    part = chunk_from(data, where)
    if part is None or (part.shape, part.dtype) != (local_part(target.live).shape, target.dtype):
        raise _Differs
    if hash_tensor(part) != target.stored_hash:
        raise _Differs
    return part
