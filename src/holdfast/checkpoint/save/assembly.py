"""From what every rank wrote to one manifest, once it is sure that together they wrote everything."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.dcp_metadata import METADATA, read_dcp_metadata, without_chunks
from holdfast.checkpoint.format.manifest import About, Chunk, FileEntry, Manifest, TensorEntry
from holdfast.checkpoint.format.snapshot import Described, Snapshot
from holdfast.checkpoint.place.layout import DCP
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.save.optimizer_record import described_optimizers


def assembled(
    snapshot: Snapshot,
    about: About,
    storage: Storage,
    staging: str,
    everything: list[tuple[dict[str, FileEntry], Described]],
    seconds: float,
) -> Manifest:
    """Return the manifest of a checkpoint that lies in its staging directory.

    Args:
        snapshot: Rank 0's part: what is the same on all ranks is taken from it.
        about: What the manifest says besides files and tensors.
        storage: The directory of checkpoints.
        staging: Name of the staging directory.
        everything: By rank, the files it wrote and what is in them.
        seconds: What the save took so far.

    Raises:
        SaveFailed: A file is shorter than it was written, DCP stored something else, ranks hold different copies of one
            chunk, or a part of a tensor is nowhere.
    """
    files = {name: entry for theirs, _ in everything for name, entry in theirs.items()}
    tensors = _merged([described.tensors for _, described in everything])
    _refuse_unwritten(storage, staging, files, tensors)
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


def _refuse_unwritten(
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


def _merged(parts: list[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Join what ranks said of each tensor; copies of a chunk must be equal, and chunks must tile the tensor.

    Raises:
        SaveFailed: A copy differs between ranks, or part of a tensor is on no rank.
    """
    merged = {}
    for name, first in parts[0].items():
        chunks: dict[tuple[Any, Any], Chunk] = {}
        for rank, part in enumerate(parts):
            for chunk in part[name].chunks:
                earlier = chunks.setdefault((chunk.offsets, chunk.sizes), chunk)
                if earlier.hash != chunk.hash:
                    raise SaveFailed(
                        f"{name} is replicated, and rank {rank} holds other numbers than an earlier rank. One of them "
                        "would be lost; per-rank state belongs into rank_state."
                    )
        ordered = tuple(sorted(chunks.values(), key=lambda chunk: chunk.offsets))
        _refuse_gaps(name, first.shape, ordered)
        merged[name] = TensorEntry(first.shape, first.dtype, ordered, first.requires_grad)
    return merged


def _refuse_gaps(name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    covered = sum(prod(chunk.sizes) for chunk in chunks)
    rows = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in chunks if chunk.sizes]
    overlap = any(start < end for (_, end), (start, _) in pairwise(rows))
    if covered != prod(shape) or overlap:
        raise SaveFailed(f"the shards of {name} hold {covered} elements of {prod(shape)}.")
