"""Read stored chunks of tensors, comparing each with its hash in the manifest.

The files were verified before, but a disk or network may return other bytes the next time. The bytes that are compared
here are the ones that are used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.errors import CheckpointCorrupt, TensorsDiffer
from holdfast.checkpoint.format.dcp import read_dcp_metadata
from holdfast.checkpoint.format.manifest import Chunk, Manifest
from holdfast.checkpoint.format.stored_chunks import chunk_within
from holdfast.checkpoint.format.verification import other_each_time, patiently, verified_bytes
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.checkpoint.place.layout import DCP, METADATA
from holdfast.checkpoint.place.storage import Storage


def verified_metadata(storage: Storage, name: str, manifest: Manifest) -> Metadata:
    """Return DCP's metadata, of bytes that have the manifest's hash, without running anything they bring.

    Raises:
        CheckpointCorrupt: The metadata is missing, damaged or hostile.
        CheckpointUnreadable: The metadata cannot be read, also after some patience, or this machine is short of memory.
    """
    file = f"{DCP}/{METADATA}"
    if file not in manifest.files:
        raise CheckpointCorrupt(f"{storage.root}/{name} lacks {file}.")
    return read_dcp_metadata(verified_bytes(storage, name, manifest, file), f"{storage.root}/{name}/{file}")


class VerifiedChunks:
    """Reads the chunks of one checkpoint."""

    def __init__(self, storage: Storage, name: str, manifest: Manifest) -> None:
        self._storage, self._name = storage, name
        self._known = {
            (key, chunk.offsets): (chunk, entry.dtype)
            for key, entry in manifest.tensors.items()
            for chunk in entry.chunks
        }

    def __call__(self, index: Any, info: Any) -> Tensor:
        """Return a whole chunk.

        Args:
            index: Tensor and offset, as DCP's metadata has them.
            info: File, offset and length, likewise.

        Raises:
            TensorsDiffer: Two reads, with one of the whole file from the disk itself between them, give the same chunk,
                and it is not what was saved.
            CheckpointUnreadable: It cannot be read, also after some patience, is another one each time, or this machine
                is short of memory.
        """
        path = f"{self._name}/{DCP}/{info.relative_path}"
        full_path = f"{self._storage.root}/{path}"
        expected = self._known.get((index.fqn, tuple(index.offset or ())))
        hashes = set()
        for _ in range(2):
            chunk = patiently(full_path, lambda: chunk_within(self._storage, path, info))
            if chunk is not None and expected is not None and _matches(chunk, *expected):
                return chunk
            hashes.add(None if chunk is None else hash_tensor(chunk))
            patiently(full_path, lambda: self._storage.hash(path, from_disk=True))
        if len(hashes) > 1:
            raise other_each_time(full_path)
        raise TensorsDiffer(
            f"{self._storage.root}/{self._name}: {index.fqn} reads back differently from what was saved, although "
            "the hashes of the files fit."
        )


def _matches(tensor: Tensor, chunk: Chunk, dtype: str) -> bool:
    same = (tuple(tensor.shape), str(tensor.dtype)) == (chunk.sizes, f"torch.{dtype}")
    return same and hash_tensor(tensor) == chunk.hash
