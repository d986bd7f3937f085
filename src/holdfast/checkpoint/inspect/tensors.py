"""Read and verify single tensors of a checkpoint in one process, without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch, NoCheckpoint
from holdfast.checkpoint.format.manifest import Chunk, Manifest, TensorEntry
from holdfast.checkpoint.format.shards import Stored, layouts_of
from holdfast.checkpoint.format.snapshot import AVERAGE, MODEL
from holdfast.checkpoint.format.verification import check_headers, patiently
from holdfast.checkpoint.place.hashing import hash_range
from holdfast.checkpoint.place.memory import memory_for, memory_of
from holdfast.checkpoint.place.storage import Storage
from holdfast.models.files.conversion import Header


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose names were verified; tensors are verified as they are read."""

    storage: Storage
    name: str
    manifest: Manifest

    @property
    def path(self) -> str:
        """Where it is, as a user writes it."""
        return f"{self.storage.root}/{self.name}"

    @property
    def has_averages(self) -> bool:
        """Whether its run kept averages of the weights."""
        return any(key.startswith(AVERAGE) for key in self.manifest.tensors)

    @cached_property
    def _stored(self) -> dict[tuple[str, str], Stored]:
        """Where each chunk is, by file and tensor, after the headers of all files were compared."""
        check_headers(self.storage, self.name, self.manifest)
        return {
            (file, stored.piece.key): stored
            for file, layout in layouts_of(self.manifest).items()
            for stored in layout.chunks
        }

    def read(self, key: str) -> Tensor:
        """Return a whole tensor by its name in the manifest.

        Raises:
            CheckpointCorrupt: Its bytes, or the header of a file of tensors, are not those that were saved.
            CheckpointUnreadable: They cannot be read, also after some patience, or this machine is short of memory.
        """
        entry = self.manifest.tensors[key]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        with memory_for(self.path, math.prod(entry.shape) * dtype.itemsize):
            tensor = torch.empty(entry.shape, dtype=dtype)
        for chunk in entry.chunks:
            region = tensor[
                tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            ]
            target = region if region.is_contiguous() else torch.empty(chunk.sizes, dtype=dtype)
            if not self._is_read(key, chunk, target):
                raise CheckpointCorrupt(f"{self.path}: {key} is damaged: its bytes are not those that were saved.")
            if target is not region:
                region.copy_(target)
        return tensor

    def _is_read(self, key: str, chunk: Chunk, target: Tensor) -> bool:
        """Copy a chunk into a tensor's memory, a second time if the first has another hash; return whether it fits."""
        if self._copied(key, chunk, target) == chunk.hash:
            return True
        path = f"{self.name}/{chunk.file}"
        patiently(f"{self.storage.root}/{path}", lambda: self.storage.hash(path, from_disk=True))
        return self._copied(key, chunk, target) == chunk.hash

    def _copied(self, key: str, chunk: Chunk, target: Tensor) -> str:
        """Copy a chunk into a tensor's memory, and return the hash of what was copied."""
        path, stored = f"{self.name}/{chunk.file}", self._stored[chunk.file, key]

        def copy() -> str:
            with self.storage.open(path) as file:
                return hash_range(file, stored.start, stored.piece.bytes_, memory_of(target))

        return patiently(f"{self.storage.root}/{path}", copy)

    def model_headers(self, dtype: torch.dtype | None) -> dict[str, Header]:
        """Return name and shape of every model tensor, with floating-point dtypes replaced by `dtype` if given."""
        return {
            key.removeprefix(MODEL): _header(entry, dtype)
            for key, entry in self.manifest.tensors.items()
            if key.startswith(MODEL)
        }


def _header(entry: TensorEntry, dtype: torch.dtype | None) -> Header:
    stored = getattr(torch, entry.dtype)
    return Header(entry.shape, dtype if dtype is not None and stored.is_floating_point else stored)


class ModelTensors(Mapping[str, Tensor]):
    """The model tensors of one checkpoint, or the mean of several, read when they are asked for."""

    def __init__(self, checkpoints: Sequence[StoredCheckpoint], *, averaged: bool = False) -> None:
        """Check that the checkpoints hold the same tensors.

        Args:
            checkpoints: Of one model.
            averaged: Give the averages that the run kept of its weights (`optim.ema`) in place of these.

        Raises:
            CheckpointMismatch: They do not; the first difference is named.
            NoCheckpoint: One of them has no averages.
        """
        self._checkpoints = list(checkpoints)
        self._averaged = averaged
        lacking = next(
            (checkpoint for checkpoint in self._checkpoints if averaged and not checkpoint.has_averages), None
        )
        if lacking is not None:
            raise NoCheckpoint(f"{lacking.path} has no averages of the weights: its run had no optim.ema.")
        first = self._checkpoints[0]
        self._names = list(first.model_headers(None))
        for checkpoint in self._checkpoints[1:]:
            first_headers, other_headers = first.model_headers(None), checkpoint.model_headers(None)
            names = sorted({*first_headers, *other_headers})
            different = next((name for name in names if first_headers.get(name) != other_headers.get(name)), None)
            if different is not None:
                raise CheckpointMismatch(
                    f"{first.path} and {checkpoint.path} hold different models: {different} differs."
                )

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; of several checkpoints the mean, taken in float64, or the last one's integers."""
        tensor = self._read(self._checkpoints[-1], name)
        if len(self._checkpoints) == 1 or not tensor.is_floating_point():
            return tensor
        total = tensor.to(torch.float64)
        for checkpoint in self._checkpoints[:-1]:
            total += self._read(checkpoint, name)
        return (total / len(self._checkpoints)).to(tensor.dtype)

    def _read(self, checkpoint: StoredCheckpoint, name: str) -> Tensor:
        tensors = checkpoint.manifest.tensors
        if not self._averaged or AVERAGE + name not in tensors:  # what is not trained has no average
            return checkpoint.read(MODEL + name)
        dtype: torch.dtype = getattr(torch, tensors[MODEL + name].dtype)
        return checkpoint.read(AVERAGE + name).to(dtype)

    def __iter__(self) -> Iterator[str]:
        """Yield names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)
