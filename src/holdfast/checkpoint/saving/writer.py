"""Commit a checkpoint atomically: stage, hash, flush, write the manifest, rename.

    1  ranks agree on what is saved; rank 0 checks space and creates a staging directory with a new name
    2  every rank writes its shards (safetensors) and its own state: hashed while written, flushed, fsynced
    3  rank 0 compares sizes of files, checks that chunks tile every tensor, writes the manifest
    4  directories are fsynced, the staging directory is renamed, its parent is fsynced
    5  all ranks learn the outcome

A failure at any point raises the same error on all ranks, removes the staging directory, and leaves earlier checkpoints
alone. All collectives run over the group `ranks` and never over the training group, so that a save may run during a
training step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import NAME, About, Chunk, FileEntry, Manifest, TensorEntry
from holdfast.checkpoint.format.shards import check_layout, gap
from holdfast.checkpoint.format.snapshot import Snapshot
from holdfast.checkpoint.place.layout import ASSETS, RANK, STAGING, TENSORS, TRAINER, fresh, step_name
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.saving.agreement import agree_on_save, described_optimizers, together_in_phase
from holdfast.checkpoint.saving.shard_writer import WrittenShard, write_shards
from holdfast.files import size_words
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part

_LATE_RANK_SECONDS = 1.0
"""Ranks that are later in a save than the others by less than this are not named."""


def assembled(
    snapshot: Snapshot,
    about: About,
    storage: Storage,
    staging: str,
    everything: list[WrittenShard],
    seconds: float,
) -> Manifest:
    """Return the manifest of a checkpoint whose files are in the staging directory, after checking them.

    Args:
        snapshot: Rank 0's snapshot, from which everything that is equal on all ranks is taken.
        about: Fields of the manifest besides files and tensors.
        storage: The directory of checkpoints.
        staging: Name of the staging directory.
        everything: For each rank, the files that it wrote and the chunks that it holds.
        seconds: Duration of the save so far.

    Raises:
        SaveFailed: A file has another size than was written, ranks hold different copies of one chunk, or chunks do not
            cover a tensor.
    """
    files = {name: entry for written in everything for name, entry in written.files.items()}
    tensors = _merged([written.tensors for written in everything])
    for name, entry in files.items():
        size = storage.size(f"{staging}/{name}")
        if size != entry.size:  # a quota or a network file system may cut a file short without an error
            raise SaveFailed(f"{name} has {size} bytes after it was closed, {entry.size} were written.")
    manifest = Manifest(
        run_id=about.run_id,
        step=about.step,
        contents=snapshot.contents,
        files=files,
        tensors=tensors,
        ties={name: tuple(aliases) for name, aliases in snapshot.ties.items()},
        optimizer=described_optimizers(snapshot),
        mesh=dict(about.mesh),
        versions=dict(about.versions),
        metrics=dict(about.metrics),
        parent=about.parent,
        parent_step=about.parent_step,
        finite=all(written.finite for written in everything),
        deviations=about.deviations,
        fingerprints=dict(about.fingerprints),
        seconds=round(seconds, 3),
    )
    check_layout(manifest)
    return manifest


def _merged(by_rank: list[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the chunks that ranks have of each tensor; copies of a chunk must be equal, and chunks must tile it.

    Raises:
        SaveFailed: A copy differs between ranks, or part of a tensor is on no rank.
    """
    merged = {}
    for name, first in by_rank[0].items():
        chunks: dict[tuple[Any, Any], Chunk] = {}
        for rank, entries in enumerate(by_rank):
            for chunk in entries[name].chunks:
                earlier = chunks.setdefault((chunk.offsets, chunk.sizes), chunk)
                if earlier.hash != chunk.hash:
                    raise SaveFailed(
                        f"{name} is replicated, and rank {rank} holds other numbers than an earlier rank. One of them "
                        "would be lost; per-rank state belongs into rank_state."
                    )
        ordered = tuple(sorted(chunks.values(), key=lambda chunk: chunk.offsets))
        wrong = gap(first.shape, ordered)
        if wrong is not None:
            raise SaveFailed(f"the shards of {name} do not make it: {wrong}.")
        merged[name] = TensorEntry(first.shape, first.dtype, ordered, first.requires_grad)
    return merged


def refuse_full_disk(snapshot: Snapshot, path: str, free: int | None, ranks: RankGroup) -> None:
    """Compare the bytes that all ranks will write with the free space; all ranks call this together.

    Args:
        snapshot: This rank's snapshot.
        path: The destination, for the message.
        free: Free bytes, equal on all ranks; None if unknown.
        ranks: The group of ranks that write.

    Raises:
        SaveFailed: There is too little space; on all ranks.
    """
    needed = sum(ranks.gather(_bytes_to_write(snapshot, first=ranks.rank == 0)))
    if free is not None and free < 1.2 * needed:
        raise SaveFailed(
            f"{path} has {size_words(free)} free, a checkpoint needs {size_words(1.2 * needed)}. Free some "
            "space or choose another run.dir."
        )


def _bytes_to_write(snapshot: Snapshot, *, first: bool) -> int:
    """Return the bytes that this rank writes; of copies on several ranks only one is written."""
    local = [local_part(tensor) for tensor in snapshot.tensors.values() if _counts_here(tensor, first=first)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _counts_here(tensor: Tensor, *, first: bool) -> bool:
    if not isinstance(tensor, DTensor):
        return first
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return not any(at and how.is_replicate() for at, how in zip(coordinate, tensor.placements, strict=True))


Reached = Callable[[str], None]
"""Called with the name of each phase as it begins; crash tests kill a rank there."""

SAVE_PHASES = ("begin", "shards", "rank state", "collect", "manifest", "sync", "publish", "published")


def commit(  # noqa: PLR0913 - what is committed, where, and who takes part
    snapshot: Snapshot,
    storage: Storage,
    about: About,
    ranks: RankGroup,
    *,
    name: str | None = None,
    reached: Reached = lambda _: None,
    notify: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write a checkpoint; every rank calls this.

    Args:
        snapshot: This rank's snapshot.
        storage: The directory of checkpoints.
        about: Fields of the manifest besides files and tensors.
        ranks: A separate process group, with its own time-out.
        name: Name of the checkpoint; default: step-<step>.
        reached: Called with the name of each phase.
        notify: Called, on every rank, with a sentence about a rank that took much longer than the others.

    Raises:
        SaveFailed: On all ranks, with the first cause; nothing was left behind.
    """
    started = time.monotonic()
    final = name or step_name(about.step)
    reached("begin")
    own_file = agree_on_save(snapshot, about, ranks)
    staging = ranks.agree(fresh(STAGING, final))
    try:
        with together_in_phase(ranks, "begin"):
            if ranks.rank == 0:
                _prepare(storage, staging, final)
        refuse_full_disk(snapshot, storage.root, _free_bytes(storage, ranks), ranks)
        reached("shards")
        shard = write_shards(snapshot, storage, staging, ranks)
        reached("rank state")
        with together_in_phase(ranks, "rank state"):
            began = time.monotonic()
            shard.files.update(_write_small(snapshot, storage, f"{staging}/", own_file, first=ranks.rank == 0))
            seconds = shard.seconds + time.monotonic() - began
        reached("collect")
        everything = ranks.gather(shard)
        _tell_of_straggler(ranks.gather(seconds), notify)
        manifest: Manifest | None = None
        with together_in_phase(ranks, "manifest"):
            if ranks.rank == 0:
                manifest = assembled(snapshot, about, storage, staging, everything, time.monotonic() - started)
                _publish(storage, staging, final, manifest, reached)
    # BaseException: Ctrl-C must not leave a staging directory behind.
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):  # a silent store must not hide what all ranks agreed on
                storage.remove(staging)
        raise
    reached("published")
    agreed = ranks.agree(manifest)
    assert agreed is not None
    return agreed


def _prepare(storage: Storage, staging: str, final: str) -> None:
    if storage.exists(final):
        raise FileExistsError(17, "a checkpoint is never overwritten", final)
    for folder in ("", f"/{TENSORS}", f"/{RANK}", f"/{ASSETS}"):
        storage.make(f"{staging}{folder}")


def _free_bytes(storage: Storage, ranks: RankGroup) -> int | None:
    free_bytes: int | None = None
    with together_in_phase(ranks, "begin"):
        if ranks.rank == 0:
            free_bytes = storage.free_bytes()
    return ranks.agree(free_bytes)


def _tell_of_straggler(seconds: list[float], notify: Callable[[str], None]) -> None:
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    other_seconds = sorted(seconds[:slowest] + seconds[slowest + 1 :])
    if other_seconds and seconds[slowest] - other_seconds[len(other_seconds) // 2] > max(
        _LATE_RANK_SECONDS, other_seconds[len(other_seconds) // 2]
    ):
        notify(
            f"rank {slowest} took {seconds[slowest]:.1f} s to write its part of a checkpoint, the others "
            f"{other_seconds[len(other_seconds) // 2]:.1f} s; look at its disk, its network and its neighbours."
        )


def _write_small(
    snapshot: Snapshot, storage: Storage, folder: str, own_file: str, *, first: bool
) -> dict[str, FileEntry]:
    texts: dict[str, bytes] = {own_file: _json(snapshot.rank_state)}
    if first:
        texts[TRAINER] = _json(snapshot.shared)
        texts |= {f"{ASSETS}/{name}": data for name, data in snapshot.assets.items()}
    written = {}
    for name, data in texts.items():
        with storage.create(folder + name) as file:
            file.write(data)
        written[name] = FileEntry(file.bytes_written, file.hexdigest())
    return written


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _publish(storage: Storage, staging: str, final: str, manifest: Manifest, reached: Reached) -> None:
    reached("manifest")
    with storage.create(f"{staging}/{NAME}") as file:
        file.write(manifest.to_json())
    reached("sync")
    # An fsync of a file makes its bytes durable, not its name: the entry is in the directory, which needs an fsync too.
    for folder in (TENSORS, RANK, ASSETS, ""):
        storage.sync(os.path.join(staging, folder) if folder else staging)  # noqa: PTH118 - storage paths are text
    reached("publish")
    storage.publish(staging, final)
