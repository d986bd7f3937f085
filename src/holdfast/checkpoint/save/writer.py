"""The commit: stage, hash, flush, manifest, rename. A checkpoint appears whole or not at all.

    1  ranks agree on what is saved; rank 0 checks space and makes a staging directory with a new name
    2  every rank writes its shards (plain DCP) and its own state: hashed while written, flushed, fsynced
    3  rank 0 reads DCP's metadata back, checks that chunks tile every tensor, writes the manifest
    4  directories are fsynced, the staging directory is renamed, its parent is fsynced
    5  all ranks learn the outcome

A failure at any point raises the same error on all ranks, removes the staging directory, and leaves earlier checkpoints
alone. Nothing here is called on the training group: a save may run while a step does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from holdfast import patience
from holdfast.checkpoint.errors import PlaceLost, SaveFailed
from holdfast.checkpoint.format.dcp_files import Writer, one_process_is_meant, without_crc32
from holdfast.checkpoint.format.manifest import NAME, About, FileEntry, Manifest
from holdfast.checkpoint.format.snapshot import Snapshot, describe_snapshot
from holdfast.checkpoint.place.layout import ASSETS, DCP, RANK, STAGING, TRAINER, fresh, step_name
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.save.agreement import agree_on_save, reason_of, together_in_phase
from holdfast.checkpoint.save.assembly import assembled
from holdfast.errors import HoldfastError
from holdfast.files import size_words
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part


def refuse_full_disk(snapshot: Snapshot, place: str, free: int | None, ranks: RankGroup) -> None:
    """Compare what ranks will write with what is free; all ranks call this together.

    Args:
        snapshot: This rank's part.
        place: Where to, for the message.
        free: Bytes, the same on all ranks; None where nobody can say.
        ranks: Who writes.

    Raises:
        SaveFailed: There is too little; on all ranks.
    """
    needed = sum(ranks.gather(_bytes_to_write(snapshot, first=ranks.rank == 0)))
    if free is not None and free < 1.2 * needed:
        raise SaveFailed(
            f"{place} has {size_words(free)} free, a checkpoint needs {size_words(1.2 * needed)}. Free some "
            "space or choose another run.dir."
        )


def _bytes_to_write(snapshot: Snapshot, *, first: bool) -> int:
    """Return this rank's share; of copies on several ranks one is written."""
    local = [local_part(tensor) for tensor in snapshot.tensors.values() if _counts_here(tensor, first=first)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _counts_here(tensor: Tensor, *, first: bool) -> bool:
    if not isinstance(tensor, DTensor):
        return first
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return not any(at and how.is_replicate() for at, how in zip(place, tensor.placements, strict=True))


Reached = Callable[[str], None]
"""Called with the name of each phase as it begins; what crash tests stop at."""

SAVE_PHASES = ("begin", "shards", "rank state", "collect", "manifest", "sync", "publish", "published")


def commit(
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
        snapshot: This rank's part.
        storage: The directory of checkpoints.
        about: The rest of the manifest.
        ranks: A group of its own, with its own timeout.
        name: Of the checkpoint; default: step-<step>.
        reached: Told each phase.
        notify: Told, on every rank, of a rank that took much longer than the others.

    Raises:
        SaveFailed: On all ranks, with the first cause; nothing was left behind.
    """
    started = time.monotonic()
    final = name or step_name(about.step)
    reached("begin")
    own_file = agree_on_save(snapshot, about, ranks)
    staging = ranks.agree(fresh(STAGING, final) if storage.renames else final)
    try:
        with together_in_phase(ranks, "begin"):
            if ranks.rank == 0:
                _prepare(storage, staging, final)
        refuse_full_disk(snapshot, storage.root, _free_bytes(storage, ranks), ranks)
        reached("shards")
        files, seconds = _write_shards(snapshot, storage, staging, ranks)
        reached("rank state")
        with together_in_phase(ranks, "rank state"):
            began = time.monotonic()
            files |= _write_small(snapshot, storage, f"{staging}/", own_file, first=ranks.rank == 0)
            seconds += time.monotonic() - began
        reached("collect")
        with together_in_phase(ranks, "collect"):
            described = describe_snapshot(snapshot)
        everything = ranks.gather((files, described))
        _tell_of_straggler(ranks.gather(seconds), notify)
        manifest: Manifest | None = None
        with together_in_phase(ranks, "manifest"):
            if ranks.rank == 0:
                manifest = assembled(snapshot, about, storage, staging, everything, time.monotonic() - started)
                _publish(storage, staging, final, manifest, reached)
    except BaseException as error:
        _take_back(storage, staging, error, first=ranks.rank == 0)
        raise
    reached("published")
    agreed = ranks.agree(manifest)
    assert agreed is not None
    storage.kept(final)
    return agreed


def _take_back(storage: Storage, staging: str, error: BaseException, *, first: bool) -> None:
    """Leave nothing of a save that failed, and everything that is somebody else's."""
    if storage.renames:
        if first:
            storage.undo(staging)
        return
    # In an object store staging is the final name. What has a manifest there is committed, and the first rank may be
    # about to put it while others lose touch; where another job has taken over, these names are its own.
    agreed = first or isinstance(error, HoldfastError)
    if agreed and not isinstance(error, PlaceLost):
        with suppress(OSError):  # a store that fell silent must not hide what all ranks agreed on
            if not storage.exists(f"{staging}/{NAME}"):
                storage.undo(staging)


def _prepare(storage: Storage, staging: str, final: str) -> None:
    if storage.exists(f"{final}/{NAME}") or (storage.renames and storage.exists(final)):
        raise FileExistsError(17, "a checkpoint is never overwritten", final)
    if not storage.renames:
        storage.remove(final)  # what a save that was killed left under this name, which is ours alone by a lease
    for folder in ("", f"/{DCP}", f"/{RANK}", f"/{ASSETS}"):
        storage.make(f"{staging}{folder}")


def _free_bytes(storage: Storage, ranks: RankGroup) -> int | None:
    free_bytes: int | None = None
    with together_in_phase(ranks, "begin"):
        if ranks.rank == 0:
            free_bytes = storage.free_bytes()
    return ranks.agree(free_bytes)


class _TimedWriter(Writer):
    """Knows how long this rank took to write, which its wait for the others hides."""

    seconds = 0.0

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write, and note the time."""
        began = time.monotonic()
        try:
            return super().write_data(plan, planner)
        finally:
            self.seconds += time.monotonic() - began


def _tell_of_straggler(seconds: list[float], notify: Callable[[str], None]) -> None:
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = sorted(seconds[:slowest] + seconds[slowest + 1 :])
    if others and seconds[slowest] - others[len(others) // 2] > max(
        patience.current.late_rank_seconds, others[len(others) // 2]
    ):
        notify(
            f"rank {slowest} took {seconds[slowest]:.1f} s to write its part of a checkpoint, the others "
            f"{others[len(others) // 2]:.1f} s; look at its disk, its network and its neighbours."
        )


def _write_shards(
    snapshot: Snapshot, storage: Storage, staging: str, ranks: RankGroup
) -> tuple[dict[str, FileEntry], float]:
    writer = _TimedWriter(storage, f"{staging}/{DCP}")
    if ranks.size == 1:
        one_process_is_meant()
    try:
        with without_crc32():
            dcp_save(dict(snapshot.tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1)
    except CheckpointException as error:  # torch raises it on every rank, with the causes by rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SaveFailed(f"rank {rank} could not save in phase 'shards': {reason_of(cause)}.") from error
    return writer.written(staging), writer.seconds


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
    data = manifest.to_json()
    if storage.renames:
        with storage.create(f"{staging}/{NAME}") as file:
            file.write(data)
        reached("sync")
        for folder in (DCP, RANK, ASSETS, ""):
            storage.sync(os.path.join(staging, folder) if folder else staging)  # noqa: PTH118 - storage paths are text
        reached("publish")
        storage.publish(staging, final)
    else:
        reached("publish")
        storage.put_new(f"{final}/{NAME}", data)
