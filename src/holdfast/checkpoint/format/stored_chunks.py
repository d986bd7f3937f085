"""Single chunks of tensors as DCP's files hold them: each one is a zip archive that torch.save wrote."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from torch import Tensor

from holdfast.checkpoint.place.memory import is_out_of_memory, memory_for, no_memory_for
from holdfast.checkpoint.place.storage import Storage


class _Bytes(io.RawIOBase):
    """A file over bytes that are somebody else's: io.BytesIO would copy what is no `bytes` object."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._position = 0

    def readable(self) -> bool:
        """Say that one can read."""
        return True

    def seekable(self) -> bool:
        """Say that one can seek."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes: as many as there are, and no memory for more."""
        end = len(self._data) if size < 0 else min(len(self._data), self._position + size)
        part = bytes(self._data[self._position : end])
        self._position += len(part)
        return part

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes."""
        into = memoryview(buffer).cast("B")
        part = self._data[self._position : self._position + len(into)]
        into[: len(part)] = part
        self._position += len(part)
        return len(part)


def chunk_from(data: bytes | memoryview, where: str) -> Tensor | None:
    """Return the tensor that DCP stored as these bytes, in memory of its own; None if they are none of its.

    Args:
        data: The whole chunk.
        where: The file they are from.

    Raises:
        CheckpointUnreadable: This machine is short of memory.
    """
    if not _archive_is_modest(data):
        return None
    try:
        file: Any = _Bytes(data)
        part: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged bytes raise whatever they like, and the rest of it means damage
        if is_out_of_memory(error):
            raise no_memory_for(where, len(data)) from error
        return None
    # A view may repeat its bytes, and so have any size.
    return part if isinstance(part, Tensor) and part.nbytes <= len(data) else None


def _archive_is_modest(data: bytes | memoryview) -> bool:
    """Return whether an archive asks for no more memory than its own bytes take."""
    try:
        file: Any = _Bytes(data)
        with zipfile.ZipFile(file) as archive:
            return sum(entry.file_size for entry in archive.infolist()) <= len(data)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False
    except MemoryError:  # for the few bytes that this takes: what went wrong before was not an archive's fault
        return True


def chunk_within(storage: Storage, path: str, info: Any) -> Tensor | None:
    """Return one stored chunk, `info` of DCP's metadata saying where in the file it is; None if none is there.

    Raises:
        OSError: What the file system says of the file.
        CheckpointUnreadable: This machine is short of memory.
    """
    where = f"{storage.root}/{path}"
    with storage.open(path) as file:
        end = file.seek(0, io.SEEK_END)
        if not 0 <= info.offset <= info.offset + info.length <= end:  # an allocation that damage asks for
            return None
        file.seek(info.offset)
        with memory_for(where, info.length):
            data = file.read(info.length)
    return chunk_from(data, where)
