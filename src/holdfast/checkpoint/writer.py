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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.checkpoint.dcp_files import Writer, one_process_is_meant, without_crc32
from holdfast.checkpoint.dcp_metadata import METADATA, read_dcp_metadata, without_chunks
from holdfast.checkpoint.errors import PlaceLost, SaveFailed
from holdfast.checkpoint.layout import ASSETS, DCP, RANK, STAGING, TRAINER, fresh, place_file, rank_file, step_name
from holdfast.checkpoint.manifest import NAME, Chunk, FileEntry, Manifest, TensorEntry
from holdfast.checkpoint.optimizer_record import described_optimizers, wrapped_records
from holdfast.checkpoint.room import refuse_full_disk
from holdfast.checkpoint.snapshot import OPTIM, Described, Snapshot, describe, outline
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.trees import first_difference
from holdfast.errors import HoldfastError
from holdfast.optim.wrapped import BETWEEN
from holdfast.parallel.collectives import ProcessExchange

Reached = Callable[[str], None]
"""Called with the name of each phase as it begins; what crash tests stop at."""

PHASES = ("begin", "shards", "rank state", "collect", "manifest", "sync", "publish", "published")

_LATE_SECONDS = 1.0
"""A rank that is later than the others by less is no news."""


@dataclass(frozen=True)
class About:
    """What a manifest says besides files and tensors."""

    run_id: str
    step: int
    parent: str | None = None
    parent_step: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()
    fingerprints: Mapping[str, Any] = field(default_factory=dict)


def commit(
    snapshot: Snapshot,
    storage: Storage,
    about: About,
    ranks: ProcessExchange,
    *,
    name: str | None = None,
    reached: Reached = lambda _: None,
    told: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write a checkpoint; every rank calls this.

    Args:
        snapshot: This rank's part.
        storage: The directory of checkpoints.
        about: The rest of the manifest.
        ranks: A group of its own, with its own timeout.
        name: Of the checkpoint; default: step-<step>.
        reached: Told each phase.
        told: Told, on every rank, of a rank that took much longer than the others.

    Raises:
        SaveFailed: On all ranks, with the first cause; nothing was left behind.
    """
    started = time.monotonic()
    final = name or step_name(about.step)
    reached("begin")
    own_file = _agree(snapshot, about, ranks)
    staging = ranks.agree(fresh(STAGING, final) if storage.renames else final)
    try:
        with together(ranks, "begin"):
            if ranks.rank == 0:
                _prepare(storage, staging, final)
        refuse_full_disk(snapshot, storage.root, _free_bytes(storage, ranks), ranks)
        reached("shards")
        files, seconds = _write_shards(snapshot, storage, staging, ranks)
        reached("rank state")
        with together(ranks, "rank state"):
            began = time.monotonic()
            files |= _write_small(snapshot, storage, f"{staging}/", own_file, first=ranks.rank == 0)
            seconds += time.monotonic() - began
        reached("collect")
        with together(ranks, "collect"):
            described = describe(snapshot)
        everything = ranks.gather((files, described))
        _tell_of_straggler(ranks.gather(seconds), told)
        manifest: Manifest | None = None
        with together(ranks, "manifest"):
            if ranks.rank == 0:
                manifest = _manifest(snapshot, about, storage, staging, everything, time.monotonic() - started)
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


@contextmanager
def together(ranks: ProcessExchange, phase: str) -> Iterator[None]:
    """Turn what goes wrong in a phase of a save, on any rank, into one SaveFailed on all."""
    with ranks.together():
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            raise SaveFailed(f"rank {ranks.rank} could not save in phase {phase!r}: {_reason(error)}.") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _agree(snapshot: Snapshot, about: About, ranks: ProcessExchange) -> str:
    """Compare what ranks want to save, before any of them waits in a collective for a tensor another does not have.

    Returns:
        The file of this rank's own state.
    """
    wrapped = wrapped_records(snapshot)
    shared = json.dumps(snapshot.shared, sort_keys=True, default=repr)
    optimizers = json.dumps(described_optimizers(snapshot), sort_keys=True)
    mine = (outline(snapshot), json.dumps(wrapped, sort_keys=True), optimizers, shared, snapshot.contents, about.step)
    everyone = ranks.gather(mine)
    for rank, theirs in enumerate(everyone[1:], start=1):
        if theirs[0] != everyone[0][0]:
            raise SaveFailed(_first_difference(everyone[0][0], theirs[0], rank))
        if theirs[1] != everyone[0][1]:
            raise SaveFailed(_first_difference(json.loads(everyone[0][1]), json.loads(theirs[1]), rank))
        if theirs[2] != everyone[0][2]:
            raise SaveFailed(_disagreement(json.loads(everyone[0][2]), json.loads(theirs[2]), rank))
        if theirs[5] != everyone[0][5]:
            raise SaveFailed(f"rank 0 saves step {everyone[0][5]}, and rank {rank} step {theirs[5]}.")
        if theirs[3:] != everyone[0][3:]:
            raise SaveFailed(
                f"ranks 0 and {rank} give different shared state. What differs between ranks belongs into rank_state."
            )
    return _own_file(snapshot, about, ranks)


def _disagreement(first: Any, other: Any, rank: int) -> str:
    """Return words about the first plain value of an optimizer that ranks hold differently: one would be lost."""
    path, mine, theirs = first_difference(first, other) or ("", first, other)
    return (
        f"ranks 0 and {rank} disagree on the optimizer's {path}: {mine!r} and {theirs!r}. Only one would be saved. "
        "Every rank must give its param groups the same hyper-parameters and keep the same values besides tensors; "
        "what is a rank's own belongs into rank_state."
    )


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    differing = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
    part = next((name for name in differing if name.startswith(OPTIM) and BETWEEN in name), None)
    name = part or differing[0]
    said = f"ranks 0 and {rank} disagree on {name}: {first.get(name, 'absent')} and {other.get(name, 'absent')}"
    if part is not None:
        return (
            f"{said}. It is a part of optimizer state of a class of its own: the optimizer decides by the size of a "
            "rank's shard whether it quantises, and these differ. Use optim.kind: adamw_8bit, which decides for all "
            "ranks alike, or another number of ranks."
        )
    return f"{said} (shape, dtype, trained). Every rank must build the same model and optimizer."


def _prepare(storage: Storage, staging: str, final: str) -> None:
    if storage.exists(f"{final}/{NAME}") or (storage.renames and storage.exists(final)):
        raise FileExistsError(17, "a checkpoint is never overwritten", final)
    if not storage.renames:
        storage.remove(final)  # what a save that was killed left under this name, which is ours alone by a lease
    for folder in ("", f"/{DCP}", f"/{RANK}", f"/{ASSETS}"):
        storage.make(f"{staging}{folder}")


def _free_bytes(storage: Storage, ranks: ProcessExchange) -> int | None:
    known: int | None = None
    with together(ranks, "begin"):
        if ranks.rank == 0:
            known = storage.free_bytes()
    return ranks.agree(known)


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


def _tell_of_straggler(seconds: list[float], told: Callable[[str], None]) -> None:
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = sorted(seconds[:slowest] + seconds[slowest + 1 :])
    if others and seconds[slowest] - others[len(others) // 2] > max(_LATE_SECONDS, others[len(others) // 2]):
        told(
            f"rank {slowest} took {seconds[slowest]:.1f} s to write its part of a checkpoint, the others "
            f"{others[len(others) // 2]:.1f} s; look at its disk, its network and its neighbours."
        )


def _write_shards(
    snapshot: Snapshot, storage: Storage, staging: str, ranks: ProcessExchange
) -> tuple[dict[str, FileEntry], float]:
    writer = _TimedWriter(storage, f"{staging}/{DCP}")
    if ranks.size == 1:
        one_process_is_meant()
    try:
        with without_crc32():
            dcp_save(dict(snapshot.tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1)
    except CheckpointException as error:  # torch raises it on every rank, with the causes by rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SaveFailed(f"rank {rank} could not save in phase 'shards': {_reason(cause)}.") from error
    return writer.written(staging), writer.seconds


def _own_file(snapshot: Snapshot, about: About, ranks: ProcessExchange) -> str:
    """Return this rank's file: by its place on the mesh, or by its number where places do not tell ranks apart."""
    everyones = ranks.gather(place_file(about.mesh, snapshot.coordinate))
    own = everyones[ranks.rank]
    return own if own is not None and len(set(everyones)) == ranks.size else rank_file(ranks.rank)


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


def _manifest(
    snapshot: Snapshot,
    about: About,
    storage: Storage,
    staging: str,
    everything: list[tuple[dict[str, FileEntry], Described]],
    seconds: float,
) -> Manifest:
    files = {name: entry for theirs, _ in everything for name, entry in theirs.items()}
    tensors = merge([described.tensors for _, described in everything])
    _check_written(storage, staging, files, tensors)
    return Manifest(
        run_id=about.run_id,
        step=about.step,
        contents=snapshot.contents,
        files=files,
        tensors=tensors,
        ties={name: tuple(others) for name, others in snapshot.ties.items()},
        optimizer=described_optimizers(snapshot),
        mesh=dict(about.mesh),
        versions=dict(about.versions),
        metrics=dict(about.metrics),
        parent=about.parent,
        parent_step=about.parent_step,
        finite=all(described.finite for _, described in everything),
        deviations=about.deviations,
        fingerprints=dict(about.fingerprints),
        seconds=round(seconds, 3),
    )


def _check_written(
    storage: Storage, staging: str, files: dict[str, FileEntry], tensors: dict[str, TensorEntry]
) -> None:
    for name, entry in files.items():
        size = storage.size(f"{staging}/{name}")
        if size != entry.size:  # a quota or a network file system may cut a file short without an error
            raise SaveFailed(f"{name} has {size} bytes after it was closed, {entry.size} were written.")
    metadata = read_dcp_metadata(storage.read(f"{staging}/{DCP}/{METADATA}"), f"{DCP}/{METADATA}")
    listed = {name: tuple(entry.size) for name, entry in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
    if listed != {name: entry.shape for name, entry in tensors.items()}:
        missing = sorted(set(tensors) ^ set(listed))
        raise SaveFailed(f"DCP wrote other tensors than it was given: {missing[:3]}.")
    partly = without_chunks(metadata, tensors)
    if partly:
        raise SaveFailed(f"DCP did not store every part of {partly[0]}.")


def merge(parts: list[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Join what ranks said of each tensor; copies of a chunk must be equal, and chunks must tile the tensor.

    Raises:
        SaveFailed: A copy differs between ranks, or part of a tensor is on no rank.
    """
    merged = {}
    for name, first in parts[0].items():
        chunks: dict[tuple[Any, Any], Chunk] = {}
        for rank, part in enumerate(parts):
            for chunk in part[name].chunks:
                known = chunks.setdefault((chunk.offsets, chunk.sizes), chunk)
                if known.hash != chunk.hash:
                    raise SaveFailed(
                        f"{name} is replicated, and rank {rank} holds other numbers than an earlier rank. One of them "
                        "would be lost; per-rank state belongs into rank_state."
                    )
        ordered = tuple(sorted(chunks.values(), key=lambda chunk: chunk.offsets))
        _refuse_gaps(name, first.shape, ordered)
        merged[name] = TensorEntry(first.shape, first.dtype, ordered, first.requires_grad)
    return merged


def _refuse_gaps(name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    covered = sum(_elements(chunk.sizes) for chunk in chunks)
    rows = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in chunks if chunk.sizes]
    overlap = any(start < end for (_, end), (start, _) in pairwise(rows))
    if covered != _elements(shape) or overlap:
        raise SaveFailed(f"the shards of {name} hold {covered} elements of {_elements(shape)}.")


def _elements(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


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
