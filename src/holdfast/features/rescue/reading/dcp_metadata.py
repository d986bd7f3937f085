"""Read the list of contents of a torch distributed checkpoint (DCP), a pickle, without running anything it brings.

A pickle could execute code, change classes and allocate any amount of memory. Its instructions are looked at first, and
it is read with an unpickler that knows only DCP's own classes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.place.memory import no_memory_for
from holdfast.features.rescue.reading.modest_pickles import names_in
from holdfast.parallel.failure.classify import is_out_of_memory

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
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}


def _member(kind: Any, name: Any) -> Any:
    # `getattr` itself would open everything that hangs on a class.
    if kind is not _MEM_FORMAT_ENCODING or type(name) is not str or name not in kind.__members__:
        raise pickle.UnpicklingError("it asks for an attribute that is no memory format, which no checkpoint needs")
    return kind[name]


_FUNCTIONS: dict[tuple[str, str], Any] = {
    # Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, "name"), others as class(value).
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _get_layout,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a listed class or a dtype; refuse the rest."""
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "pathlib._local":  # Python 3.13 alone has this module
            module = "pathlib"
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_dcp_metadata(data: bytes, path: str) -> Metadata:
    """Read DCP's metadata without running anything it brings.

    Args:
        data: The file.
        path: Its path.

    Raises:
        CheckpointCorrupt: The metadata is damaged or hostile.
        CheckpointUnreadable: This machine is short of memory.
    """
    try:
        names_in(data, in_order=True)
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check_form(metadata)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        if is_out_of_memory(error):
            raise no_memory_for(path, len(data)) from error
        raise CheckpointCorrupt(f"{path} cannot be read: {str(error) or type(error).__name__}.") from None
    assert isinstance(metadata, Metadata)
    return metadata


def _check_form(metadata: Any) -> None:
    """Check all attributes of the metadata that are used later; a damaged pickle may have any others, or none."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}, not DCP metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"it lists {name} as a {type(entry).__name__}")
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
