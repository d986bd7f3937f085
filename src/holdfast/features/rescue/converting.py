"""Rewrites checkpoints of format 2, whose tensors are in a torch distributed checkpoint (DCP), in the present format.

Format 2 kept tensors in dcp/, each chunk as torch.save writes it, and their places in a pickle. Every chunk is compared
with its hash before it is written again; what is written is verified before it takes the checkpoint's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.api import place_of
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.manifest import (
    FORMAT,
    NAME,
    FileEntry,
    Manifest,
    OtherFormat,
    TensorEntry,
    parse,
    parse_as,
)
from holdfast.checkpoint.format.shards import ShardLayout, hashes_of, layouts_of, shard_file
from holdfast.checkpoint.format.verification import (
    check_listed,
    damage,
    damaged_files,
    read_manifest,
    verified_bytes,
    verify_checkpoint,
)
from holdfast.checkpoint.keep.find import folder_of
from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.place.hashing import HashingWriter, hash_tensor
from holdfast.checkpoint.place.layout import ASSETS, FOLDER, RANK, STAGING, TENSORS, fresh, step_of
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.memory import memory_of
from holdfast.checkpoint.place.storage import LocalStorage, exchange
from holdfast.errors import UserError
from holdfast.features.rescue.reading.dcp_directory import DcpDirectory
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, TensorPiece

EARLIER = 2
"""The format that is read here."""
_DCP = "dcp"
_ASIDE = f".format-{EARLIER}"
"""End of the name of a checkpoint while the one that was made of it takes its place."""


def convert(path: str) -> Iterator[str]:
    """Rewrite a checkpoint, or every checkpoint of a run, and yield a line about each.

    Args:
        path: A run, its folder of checkpoints, or one checkpoint, on a disk.

    Raises:
        NoCheckpoint: No checkpoint is there.
        DirectoryTaken: A run is using the directory.
        CheckpointCorrupt: A checkpoint is damaged; it stays as it is, and the others of the run are converted.
        UserError: The path is a URL.
    """
    if "://" in path:
        raise UserError(f"{path} is in an object store. Copy it to a disk, convert it there, and copy it back.")
    storage, single = _place(path)
    with Lease(storage):
        _put_back(storage)
        errors: list[CheckpointError] = []
        for name in [single] if single else list(steps(storage).values()):
            if not storage.exists(f"{name}/{NAME}"):
                yield f"{storage.root}/{name} has no {NAME}, so Holdfast did not write it; it is left as it is"
                continue
            try:
                yield _line(storage, name)
            except CheckpointError as error:  # the others are converted all the same
                errors.append(error)
        for later in errors[1:]:
            yield f"not converted: {later}"
        if errors:
            raise errors[0]


def _line(storage: LocalStorage, name: str) -> str:
    """Convert a checkpoint, unless it has the present format, and return a line about it."""
    data, full_path = storage.read(f"{name}/{NAME}"), f"{storage.root}/{name}"
    try:
        parse(data, f"{full_path}/{NAME}")
    except OtherFormat:
        earlier = parse_as(EARLIER, data, f"{full_path}/{NAME}", _with_files)
        real = storage.path(name).resolve()  # a checkpoint may be a link to another disk, and stays there
        manifest = _converted(LocalStorage(real.parent), real.name, replace(earlier, parent=_parent(storage, earlier)))
        return f"{full_path} has format {FORMAT} now: {len(manifest.tensors)} tensors, {len(manifest.files)} files"
    return f"{full_path} has format {FORMAT} already"


def _place(path: str) -> tuple[LocalStorage, str | None]:
    """Return the directory of the checkpoints that a path means, and the name of a single one."""
    folder, name = place_of(str(Path(path).absolute()))
    if any(folder.exists(f"{each}/{NAME}") for each in (name, name + _ASIDE)):
        return LocalStorage(Path(folder.root)), name.removesuffix(_ASIDE)
    for candidate in (LocalStorage(Path(path) / FOLDER), LocalStorage(Path(path))):
        if any(step_of(each.removesuffix(_ASIDE)) is not None for each in candidate.names()):
            return candidate, None
    return LocalStorage(Path(folder_of(path).root)), None  # which says what it is instead


def _put_back(storage: LocalStorage) -> None:
    """Give checkpoints their names again that a crash between two renames left under another one.

    Where the crash came after the second rename, the earlier one is removed once the present one verifies.
    """
    for aside in storage.names():
        name = aside.removesuffix(_ASIDE)
        if aside == name or step_of(name) is None:
            continue
        if not storage.exists(name):
            storage.rename(aside, name)
            continue
        with suppress(NoCheckpoint, CheckpointError, OtherFormat):
            verify_checkpoint(storage, name)
            storage.remove(aside)


def _parent(storage: LocalStorage, earlier: Manifest) -> str | None:
    """Return the hash of the checkpoint that a run saved before: it has another one since it was converted."""
    before = None if earlier.parent_step is None else steps(storage).get(earlier.parent_step)
    if before is not None:
        with suppress(NoCheckpoint, CheckpointError, OtherFormat):
            manifest = read_manifest(storage, before)
            if manifest.run_id == earlier.run_id:
                return manifest.hash
    return earlier.parent


def _with_files(body: Any) -> Any:
    """Return a manifest of format 2 with an empty name of a file in each chunk, which format 2 did not state."""
    tensors = {
        key: {**entry, "chunks": [{**chunk, "file": ""} for chunk in entry["chunks"]]}
        for key, entry in body["tensors"].items()
    }
    return {**body, "tensors": tensors}


def _converted(storage: LocalStorage, name: str, earlier: Manifest) -> Manifest:
    """Write a checkpoint anew beside its place, verify it, and exchange both; return its manifest.

    Raises:
        CheckpointCorrupt: It is damaged; nothing was changed.
    """
    full_path = f"{storage.root}/{name}"
    check_listed(storage, name, earlier)
    damaged = damaged_files(storage, name, earlier, sorted(earlier.files))
    if damaged:
        raise CheckpointCorrupt(damage(full_path, damaged, []))
    staging = fresh(STAGING, name)
    try:
        try:
            manifest = _write(storage, name, staging, earlier)
        except DamagedFile as error:
            raise CheckpointCorrupt(f"{full_path}/{_DCP} {error}.") from error
        verify_checkpoint(storage, staging)
        damaged = damaged_files(storage, staging, manifest, sorted(manifest.files), from_disk=True)
        if damaged:  # the disk has other bytes than the page cache
            raise CheckpointCorrupt(damage(f"{storage.root}/{staging}", damaged, []))
        for folder in (TENSORS, RANK, ASSETS, ""):
            storage.sync(f"{staging}/{folder}" if folder else staging)
        _take_place(storage, staging, name)
    finally:
        storage.remove(staging)
    return manifest


def _write(storage: LocalStorage, name: str, staging: str, earlier: Manifest) -> Manifest:
    """Write the files of a checkpoint in the present format.

    Raises:
        DamagedFile: A chunk is missing, or is not what was saved.
    """
    for folder in ("", f"/{TENSORS}", f"/{RANK}", f"/{ASSETS}"):
        storage.make(f"{staging}{folder}")
    pieces = _pieces(storage.path(f"{name}/{_DCP}"), earlier)
    dcp_files = sorted({piece.file for piece in pieces.values()}, key=lambda file: (len(file), file))  # __2_0, __10_0
    numbers = {file: number for number, file in enumerate(dcp_files)}
    tensors = {key: _placed(key, entry, pieces, numbers) for key, entry in earlier.tensors.items()}
    files = {}
    for file in (file for file in earlier.files if not file.startswith(f"{_DCP}/")):
        with storage.create(f"{staging}/{file}") as written:
            written.write(verified_bytes(storage, name, earlier, file))
        files[file] = FileEntry(written.bytes_written, written.hexdigest())
    to_write = {shard_file(number): FileEntry(0, "") for number in numbers.values()}
    manifest = replace(earlier, tensors=tensors, files=files | to_write, format=FORMAT)
    hashes = hashes_of(manifest)
    for file, layout in layouts_of(manifest).items():
        expected = {stored.piece.key: hashes[file, stored.piece.key] for stored in layout.chunks}
        with storage.create(f"{staging}/{file}") as written:
            _write_shard(written, layout, expected, pieces)
        files[file] = FileEntry(written.bytes_written, written.hexdigest())
    manifest = replace(manifest, files=files)
    with storage.create(f"{staging}/{NAME}") as written:
        written.write(manifest.to_json())
    return manifest


def _placed(
    key: str,
    entry: TensorEntry,
    pieces: Mapping[tuple[str, tuple[int, ...]], TensorPiece],
    numbers: Mapping[str, int],
) -> TensorEntry:
    """Return a tensor's entry with the new file of each chunk: DCP's file of a number becomes the shard of it."""
    chunks = []
    for chunk in entry.chunks:
        piece = pieces.get((key, chunk.offsets))  # None of a chunk without elements
        chunks.append(replace(chunk, file=shard_file(numbers[piece.file] if piece else 0)))
    return replace(entry, chunks=tuple(chunks))


def _write_shard(
    written: HashingWriter,
    layout: ShardLayout,
    hashes: Mapping[str, str],
    pieces: Mapping[tuple[str, tuple[int, ...]], TensorPiece],
) -> None:
    """Write one file of tensors, each chunk after comparing its hash.

    Raises:
        DamagedFile: A chunk is not what was saved.
    """
    written.write(layout.header)
    for stored in layout.chunks:
        key, offsets = stored.piece.key, stored.piece.offsets
        if not stored.piece.bytes_:
            continue
        tensor = pieces[key, offsets].read()
        if hash_tensor(tensor) != hashes[key]:
            raise DamagedFile(f"holds other bytes of {key} than were saved")
        written.write(memory_of(tensor))


def _pieces(folder: Path, earlier: Manifest) -> dict[tuple[str, tuple[int, ...]], TensorPiece]:
    """Return the chunks in DCP's files, by tensor and offsets.

    Raises:
        DamagedFile: They are not those of the manifest.
    """
    checkpoint = ForeignCheckpoint("Holdfast", f"format {EARLIER}", folder)
    directory = DcpDirectory(folder, checkpoint)
    for finding in checkpoint.of_kind("damage"):
        raise DamagedFile(f"is damaged: {finding.text}")
    if set(directory) != set(earlier.tensors):
        raise DamagedFile(f"holds other tensors than the manifest: {sorted(set(directory) ^ set(earlier.tensors))[:3]}")
    pieces: dict[tuple[str, tuple[int, ...]], TensorPiece] = {}
    for key, entry in earlier.tensors.items():
        stored = {piece.offsets: piece for piece in directory.tensor(key).pieces if 0 not in piece.sizes}
        if {(offsets, piece.sizes) for offsets, piece in stored.items()} != {
            (chunk.offsets, chunk.sizes) for chunk in entry.chunks if 0 not in chunk.sizes
        }:
            raise DamagedFile(f"holds other chunks of {key} than the manifest lists")
        pieces |= {(key, offsets): piece for offsets, piece in stored.items()}
    return pieces


def _take_place(storage: LocalStorage, staging: str, name: str) -> None:
    """Put a written checkpoint in the place of the one that it was written from, which has the name `staging` then."""
    if not exchange(storage.path(staging), storage.path(name)):
        # Between the two renames a crash leaves the earlier one under a name that no start removes (`_put_back`).
        aside = f"{name}{_ASIDE}"
        storage.rename(name, aside)
        storage.rename(staging, name)
        storage.sync("")
        storage.rename(aside, staging)
    storage.sync("")
