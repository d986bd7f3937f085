"""DCP's `.metadata`, read without running it: it is a pickle, and a pickle can run code and ask for any memory."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import TensorEntry
from holdfast.checkpoint.place.memory import is_out_of_memory, no_memory_for

METADATA = ".metadata"

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
}

_NUMBERED = {"PUT", "LONG_BINPUT"}
"""Opcodes that grow the table of what is remembered up to a number."""


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a listed class or a dtype; refuse the rest."""
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_dcp_metadata(data: bytes, where: str) -> Metadata:
    """Read DCP's metadata without running anything it brings.

    Raises:
        CheckpointCorrupt: The metadata is damaged, hostile, or lists something that is no tensor.
        CheckpointUnreadable: This machine is short of memory.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check_form(metadata)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        if is_out_of_memory(error) and _pickle_is_modest(data):
            raise no_memory_for(where, len(data)) from error
        raise CheckpointCorrupt(f"{where} cannot be read: {str(error) or type(error).__name__}.") from None
    assert isinstance(metadata, Metadata)
    return metadata


def _pickle_is_modest(data: bytes) -> bool:
    """Return whether a pickle asks for no more memory than goes with its own length."""
    try:
        numbers = [number for opcode, number, _ in pickletools.genops(data) if opcode.name in _NUMBERED]
    except ValueError:  # a text longer than what is left, or no pickle at all
        return False
    except MemoryError:  # this takes less than the pickle did
        return True
    return all(number is not None and number <= len(data) for number in numbers)


def _check_form(metadata: Any) -> None:
    """Look at everything that is used later: an unpickled object may have any attributes, or none."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}, not DCP metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"it lists {name}, which is no tensor: reading it would unpickle it")
        numbers = [*entry.size, *(number for chunk in entry.chunks for number in (*chunk.offsets, *chunk.sizes))]
        if set(map(type, numbers)) - {int}:
            raise TypeError(f"the shape of {name} is damaged")
        if any(not len(entry.size) == len(chunk.offsets) == len(chunk.sizes) for chunk in entry.chunks):
            raise ValueError(f"a chunk of {name} has another number of dimensions")
    _check_places(metadata)


def _check_places(metadata: Metadata) -> None:
    for index, info in (metadata.storage_data or {}).items():
        if (type(index.fqn), type(info.offset), type(info.length)) != (str, int, int):
            raise TypeError(f"the place of {index.fqn} is damaged")
        if "/" in info.relative_path:
            raise ValueError(f"it leads out of the checkpoint, to {info.relative_path}")


def without_chunks(metadata: Metadata, tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the tensors of which DCP does not list, or did not store, exactly the chunks of the manifest.

    DCP checks neither when it loads: memory that no chunk covers keeps what was in it.
    """
    stored = {(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data or {}}
    incomplete = []
    for name, entry in tensors.items():
        listed: Any = metadata.state_dict_metadata.get(name)
        there = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed.chunks} if listed else set()
        expected = {(chunk.offsets, chunk.sizes) for chunk in entry.chunks if 0 not in chunk.sizes}
        there = {(offsets, sizes) for offsets, sizes in there if 0 not in sizes}  # a rank without rows may write none
        if there != expected or any((name, offsets) not in stored for offsets, _ in expected):
            incomplete.append(name)
    return incomplete
