"""Verify that a checkpoint holds what was written. There are three levels; each includes the previous ones.

names    the manifest is whole, every listed file is there in its size, and no other
files    every file's hash
tensors  the header of every file of tensors, and every chunk   (`holdfast checkpoint verify`, default)

A resume compares headers and chunks while it reads them, and so every byte too (`loading/chunk_reader.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.format.manifest import NAME, Manifest, parse
from holdfast.checkpoint.format.other_systems import describe_foreign
from holdfast.checkpoint.format.shards import ShardLayout, Stored, check_layout, hashes_of, layouts_of
from holdfast.checkpoint.place.hashing import hash_bytes, hash_range
from holdfast.checkpoint.place.layout import step_of
from holdfast.checkpoint.place.memory import memory_for
from holdfast.checkpoint.place.storage import Storage
from holdfast.files import MOST_TEXT_BYTES, again
from holdfast.parallel.collectives import RankGroup

_ABSENT = "It is not there."

Level = Literal["names", "files", "tensors"]
T = TypeVar("T")


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Return a checkpoint's manifest; a fault is reported only after two reads have shown it.

    Raises:
        NoCheckpoint: There is none; what is there instead is named.
        CheckpointCorrupt: The manifest is damaged.
        CheckpointUnreadable: The manifest cannot be read, also after some patience, or differs at each read.
    """
    full_path = f"{storage.root}/{name}" if name else storage.root
    path = f"{name}/{NAME}" if name else NAME
    wrong = _twice(f"{full_path}/{NAME}", lambda: _presence(storage, path))
    if wrong == _ABSENT:
        foreign = patiently(full_path, lambda: describe_foreign(storage, name))
        raise NoCheckpoint(f"{full_path} is no checkpoint of Holdfast: {foreign}")
    if wrong is not None:
        raise CheckpointCorrupt(wrong)
    manifest = _parsed(storage, path, f"{full_path}/{NAME}")
    if step_of(name) not in {None, manifest.step}:
        raise CheckpointCorrupt(f"{full_path} is step {manifest.step}, whatever its name says: it was renamed.")
    return manifest


def _presence(storage: Storage, path: str) -> str | None:
    if not storage.exists(path):
        return _ABSENT
    if not storage.is_file(path):
        return f"{storage.root}/{path} is no file: it is {storage.kind(path)}."
    size = storage.size(path)
    if size > MOST_TEXT_BYTES:
        return f"{storage.root}/{path} is no manifest: it has {size:,} bytes, more than any."
    return None


def _parsed(storage: Storage, path: str, full_path: str) -> Manifest:
    """Read a manifest, a second time from the disk itself if the first gives nonsense."""
    data = patiently(full_path, lambda: storage.read(path))
    try:
        return parse(data, full_path)
    except CheckpointCorrupt:
        on_disk = patiently(full_path, lambda: storage.hash(path, from_disk=True))
        if hash_bytes(data) == on_disk:
            raise
    data = patiently(full_path, lambda: storage.read(path))
    try:
        return parse(data, full_path)
    except CheckpointCorrupt as error:
        if hash_bytes(data) == on_disk:
            raise
        raise other_each_time(full_path) from error


def verified_bytes(storage: Storage, name: str, manifest: Manifest, file: str) -> bytes:
    """Return the bytes of a small file after comparing their hash with the manifest's, reading twice if they differ.

    The bytes that are returned are the bytes that were compared, since a second read may return others.

    Raises:
        CheckpointCorrupt: Two reads, with one from the disk itself between them, give the same wrong bytes.
        CheckpointUnreadable: It cannot be read, also after some patience, or every read gives other bytes.
    """
    path, expected = f"{name}/{file}", manifest.files[file].hash
    full_path = f"{storage.root}/{path}"
    hashes = set()
    for _ in range(2):
        data = patiently(full_path, lambda: storage.read(path))
        if hash_bytes(data) == expected:
            return data
        hashes |= {hash_bytes(data), patiently(full_path, lambda: storage.hash(path, from_disk=True))}
    if len(hashes) > 1:
        raise other_each_time(full_path)
    raise CheckpointCorrupt(damage(f"{storage.root}/{name}", [file], []))


def patiently(full_path: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, retrying after errors that a file system may get over.

    Raises:
        CheckpointUnreadable: It gives no answer, also after some patience, or there is no memory for it.
    """
    try:
        with memory_for(full_path):
            return again(ask)
    except OSError as error:
        raise _unreadable(full_path, error) from error


def _twice(full_path: str, look: Callable[[], str | None]) -> str | None:
    """Return the fault that two checks in a row report, or None if one of them reports none.

    Raises:
        CheckpointUnreadable: The check cannot read, or the two report different faults.
    """
    first = patiently(full_path, look)
    second = None if first is None else patiently(full_path, look)
    if second is not None and first != second:
        raise CheckpointUnreadable(
            f"{full_path} looks different each time, so nothing is known of it. At first: {first} Then: {second} Look "
            "at the disk, the network and who else writes there."
        )
    return second


def _unreadable(full_path: str, error: OSError) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        f"{full_path} cannot be read: {error.strerror or error}. Nothing is known of its bytes; try again when the "
        "file system answers."
    )


def other_each_time(full_path: str) -> CheckpointUnreadable:
    """Return the error for a file whose bytes differ from read to read."""
    return CheckpointUnreadable(
        f"{full_path} has other bytes each time it is read, so nothing is known of it. Look at the disk, its cables "
        "and this machine's memory."
    )


def check_names(storage: Storage, name: str, manifest: Manifest) -> None:
    """Compare the listed files with those that exist; a fault is reported only after two checks have found it.

    Raises:
        CheckpointCorrupt: A file is missing, of another size, or not listed; or the manifest contradicts itself.
        CheckpointUnreadable: Nobody can look, also after some patience, or each look shows something else.
    """
    full_path = f"{storage.root}/{name}"
    try:
        check_layout(manifest)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{error.args[0]!r} is no file of it" if isinstance(error, KeyError) else error
        raise CheckpointCorrupt(f"{full_path}/{NAME} contradicts itself, although its hash fits: {reason}.") from error
    check_listed(storage, name, manifest)


def check_listed(storage: Storage, name: str, manifest: Manifest) -> None:
    """Compare the files that a manifest lists with those that exist, by name and size.

    Raises:
        CheckpointCorrupt, CheckpointUnreadable: As `check_names`.
    """
    full_path = f"{storage.root}/{name}"
    wrong = _twice(full_path, lambda: _misnamed(storage, name, manifest, full_path))
    if wrong is not None:
        raise CheckpointCorrupt(wrong)


def _misnamed(storage: Storage, name: str, manifest: Manifest, full_path: str) -> str | None:
    present = set(storage.files(name)) - {NAME}
    missing = sorted(set(manifest.files) - present)
    if missing:
        return f"{full_path} lacks {missing[0]}" + _more(missing)
    extra = sorted(present - set(manifest.files))
    if extra:
        return f"{full_path} holds {extra[0]}, which its manifest does not list" + _more(extra)
    for file, entry in manifest.files.items():
        if not storage.is_file(f"{name}/{file}"):
            return f"{full_path}/{file} is no file: it is {storage.kind(f'{name}/{file}')}."
        size = storage.size(f"{name}/{file}")
        if size != entry.size:
            return f"{full_path}/{file} has {size} bytes, the manifest says {entry.size}."
    return None


def damaged_files(
    storage: Storage, name: str, manifest: Manifest, files: Sequence[str], *, from_disk: bool = False
) -> list[str]:
    """Return the files for which two reads, the second bypassing the page cache, give the same wrong hash.

    Args:
        storage, name, manifest: The checkpoint.
        files: The files to check.
        from_disk: Whether the first read bypasses the page cache too, which holds what was just written.

    Raises:
        CheckpointUnreadable: A file cannot be read, also after some patience, or every read gives other bytes.
    """
    damaged = []
    for file in files:
        path, expected = f"{name}/{file}", manifest.files[file].hash
        first = _hash(storage, path, from_disk=from_disk)
        second = first if first == expected else _hash(storage, path, from_disk=True)
        if expected not in {first, second}:
            if first != second:
                raise other_each_time(f"{storage.root}/{path}")
            damaged.append(file)
    return damaged


def _hash(storage: Storage, path: str, *, from_disk: bool) -> str:
    return patiently(f"{storage.root}/{path}", lambda: storage.hash(path, from_disk=from_disk))


def check_files(storage: Storage, name: str, manifest: Manifest) -> None:
    """Compare every file's hash; a damaged shard is narrowed down to its tensors.

    Raises:
        CheckpointCorrupt: A file differs.
        CheckpointUnreadable: As `damaged_files`.
    """
    damaged = damaged_files(storage, name, manifest, sorted(manifest.files))
    if damaged:
        tensors = tensors_within(storage, name, manifest, damaged)
        raise CheckpointCorrupt(damage(f"{storage.root}/{name}", damaged, tensors))


def damage(full_path: str, files: Sequence[str], tensors: Sequence[str]) -> str:
    """Return the sentence about damaged files and what they held."""
    holds = f" Damaged tensors: {', '.join(tensors[:4])}{_more(tensors, 4)}" if tensors else ""
    return f"{full_path}/{files[0]} is damaged: its hash is not the manifest's{_more(files)}{holds}"


def check_headers(storage: Storage, name: str, manifest: Manifest) -> None:
    """Compare the header of every file of tensors with the one that follows from the manifest.

    Raises:
        CheckpointCorrupt: A header is another one, in two reads.
        CheckpointUnreadable: A file cannot be read, also after some patience, or each read gives other bytes.
    """
    for file, layout in layouts_of(manifest).items():
        full_path = f"{storage.root}/{name}/{file}"
        wrong = _twice(full_path, lambda file=file, layout=layout: _other_header(storage, name, file, layout))  # type: ignore[misc]
        if wrong is not None:
            raise CheckpointCorrupt(wrong)


def _other_header(storage: Storage, name: str, file: str, layout: ShardLayout) -> str | None:
    with storage.open(f"{name}/{file}") as opened:
        if opened.read(len(layout.header)) == layout.header:
            return None
    return f"{storage.root}/{name}/{file} is damaged: its header does not list the tensors that the manifest lists."


def damaged_tensors(storage: Storage, name: str, manifest: Manifest) -> list[str]:
    """Return the tensors of which a chunk reads back differently.

    Raises:
        CheckpointUnreadable: A file cannot be read, also after some patience.
    """
    return sorted(set(_differing(storage, name, manifest, list(layouts_of(manifest)))))


def tensors_within(storage: Storage, name: str, manifest: Manifest, files: Sequence[str]) -> list[str]:
    """Return the tensors of which a chunk in damaged files reads back differently, as far as that is found out now.

    Args:
        storage, name, manifest: The checkpoint.
        files: Its damaged files: that they are stands, whatever becomes of this look.
    """
    try:
        return sorted(set(_differing(storage, name, manifest, files)))
    except CheckpointUnreadable:
        return []


def _differing(storage: Storage, name: str, manifest: Manifest, files: Sequence[str]) -> Iterator[str]:
    """Yield the tensor of every chunk in these files that reads back differently."""
    hashes = hashes_of(manifest)
    for file, layout in layouts_of(manifest).items():
        for stored in layout.chunks if file in files else ():
            if _chunk_differs(storage, f"{name}/{file}", stored, hashes[file, stored.piece.key]):
                yield stored.piece.key


def _chunk_differs(storage: Storage, path: str, stored: Stored, expected: str) -> bool:
    """Return whether two reads of a chunk, with one of the whole file from the disk between them, have another hash."""
    full_path = f"{storage.root}/{path}"

    def read() -> str:
        with storage.open(path) as opened:
            return hash_range(opened, stored.start, stored.piece.bytes_)

    if patiently(full_path, read) == expected:
        return False
    patiently(full_path, lambda: storage.hash(path, from_disk=True))
    return patiently(full_path, read) != expected


def verify_checkpoint(storage: Storage, name: str, level: Level = "tensors") -> Manifest:
    """Verify a checkpoint and return its manifest.

    Raises:
        NoCheckpoint: There is none.
        CheckpointCorrupt: Something differs; the file or tensor is named.
        CheckpointUnreadable: Nobody can look, also after some patience, or this machine is short of memory.
    """
    manifest = read_manifest(storage, name)
    check_names(storage, name, manifest)
    if level in {"files", "tensors"}:
        check_files(storage, name, manifest)
    if level == "tensors":
        check_headers(storage, name, manifest)
        damaged = damaged_tensors(storage, name, manifest)
        if damaged:
            raise CheckpointCorrupt(
                f"{storage.root}/{name}: {damaged[0]} is damaged: its bytes are not those that were saved"
                f"{_more(damaged)}"
            )
    return manifest


def named_manifest(storage: Storage, name: str, ranks: RankGroup) -> Manifest:
    """Return the manifest after rank 0 has compared the names and sizes of all files with it.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointUnreadable: On all ranks.
    """

    def read() -> Manifest:
        manifest = read_manifest(storage, name)
        check_names(storage, name, manifest)
        return manifest

    return ranks.on_first_rank(read)


def verified_manifest(storage: Storage, name: str, ranks: RankGroup, *, from_disk: bool = False) -> Manifest:
    """Return the manifest after the hash of every file was compared; files are distributed over the ranks.

    Args:
        storage, name: The checkpoint.
        ranks: The group of ranks, all of which call this.
        from_disk: Whether to read the disk instead of the page cache.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointUnreadable: On all ranks.
    """
    manifest = named_manifest(storage, name, ranks)
    files = sorted(manifest.files)[ranks.rank :: ranks.size]
    own_damaged = ranks.on_all_ranks(lambda: damaged_files(storage, name, manifest, files, from_disk=from_disk))
    damaged = sorted({file for rank_damaged in ranks.gather(own_damaged) for file in rank_damaged})
    if damaged:
        tensors = ranks.on_first_rank(lambda: tensors_within(storage, name, manifest, damaged))
        raise CheckpointCorrupt(damage(f"{storage.root}/{name}", damaged, tensors))
    return manifest


def _more(items: Sequence[str], listed: int = 1) -> str:
    return f" (and {len(items) - listed} more)." if len(items) > listed else "."
