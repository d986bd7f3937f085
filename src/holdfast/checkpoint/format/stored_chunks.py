"""Read single chunks of tensors from DCP's files, in which each chunk is a zip archive that torch.save wrote."""

from __future__ import annotations

import io
import struct
from typing import Any

import torch
from torch import Tensor

from holdfast.checkpoint.place.memory import memory_for, no_memory_for
from holdfast.checkpoint.place.storage import Storage
from holdfast.parallel.failure.classify import is_out_of_memory

_TAIL = struct.Struct("<4sQ2H2L4Q4sLQL4s4H2LH")
"""End of an archive of torch.save: zip64 end of central directory, its locator, end of central directory record."""
_ENTRY = struct.Struct("<4s20xL3H12x")
"""One file in the central directory: signature, unpacked size, lengths of the name, extra fields and comment."""
_EXTRA, _SIZE = struct.Struct("<2H"), struct.Struct("<Q")
"""An extra field's kind and length, and a size of 64 bits."""
_IN_64_BITS, _SIZES = 0xFFFFFFFF, 1
"""Marker of a size that does not fit in 32 bits and is in an extra field, and the kind of that field."""


class _Bytes(io.RawIOBase):
    """A readable file over a memoryview, which io.BytesIO would copy."""

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
        data = bytes(self._data[self._position : end])
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes."""
        into = memoryview(buffer).cast("B")
        data = self._data[self._position : self._position + len(into)]
        into[: len(data)] = data
        self._position += len(data)
        return len(data)


def chunk_from(data: bytes | memoryview, path: str) -> Tensor | None:
    """Return the tensor that DCP stored as these bytes, in new memory; None if they are not such a chunk.

    Args:
        data: All bytes of the chunk.
        path: File of the chunk, for messages.

    Raises:
        CheckpointUnreadable: This machine is short of memory.
    """
    if not _archive_is_modest(data):
        return None
    try:
        file: Any = _Bytes(data)
        tensor: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged bytes raise whatever they like, and the rest of it means damage
        if is_out_of_memory(error):
            raise no_memory_for(path, len(data)) from error
        return None
    # A view may repeat its bytes, and so have any size.
    return tensor if isinstance(tensor, Tensor) and tensor.nbytes <= len(data) else None


def _archive_is_modest(data: bytes | memoryview) -> bool:
    """Return whether the unpacked files of an archive of torch.save are together no larger than the archive.

    False for any other archive, since readers differ in how they find its central directory. What the pickle inside
    will request is not checked here.
    """
    try:
        size = _unpacked_size(data)
    except MemoryError:  # for the few bytes that this takes: what went wrong before was not an archive's fault
        return True
    return size is not None and size <= len(data)


def _unpacked_size(data: bytes | memoryview) -> int | None:
    """Return the bytes of all files of an archive, as torch's own reader takes them from its list.

    None where it does not begin or end as torch.save's do, or where its list is not whole. By these ends torch's reader
    can come to no other list. Python's zipfile takes longer, and can be led to another one.
    """
    end = len(data) - _TAIL.size
    if end < 0 or bytes(data[:4]) != b"PK\3\4":  # torch.load takes what begins otherwise for no archive
        return None
    fields = _TAIL.unpack_from(data, end)
    entries, size, offset = fields[7:10]
    signatures, end_by_locator, comment = (fields[0], fields[10], fields[14]), fields[12], fields[-1]
    if signatures != (b"PK\6\6", b"PK\6\7", b"PK\5\6") or comment or not end_by_locator == offset + size == end:
        return None
    total, at = 0, offset
    for _ in range(entries):
        if at + _ENTRY.size > end:
            return None
        signature, unpacked, name, extra, text = _ENTRY.unpack_from(data, at)
        if signature != b"PK\1\2":
            return None
        at += _ENTRY.size + name
        total += _size_in_64_bits(data, at, min(at + extra, end)) if unpacked == _IN_64_BITS else unpacked
        at += extra + text
    return total if at == end else None


def _size_in_64_bits(data: bytes | memoryview, at: int, end: int) -> int:
    """Return the size that the first extra field of sizes holds, or what 32 bits say where there is none."""
    while at + _EXTRA.size + _SIZE.size <= end:
        kind, length = _EXTRA.unpack_from(data, at)
        at += _EXTRA.size
        if kind == _SIZES:
            return int(_SIZE.unpack_from(data, at)[0]) if length >= _SIZE.size else _IN_64_BITS
        at += length
    return _IN_64_BITS


def chunk_within(storage: Storage, path: str, info: Any) -> Tensor | None:
    """Return one stored chunk, `info` of DCP's metadata saying where in the file it is; None if none is there.

    Raises:
        OSError: What the file system says of the file.
        CheckpointUnreadable: This machine is short of memory.
    """
    full_path = f"{storage.root}/{path}"
    with storage.open(path) as file:
        end = file.seek(0, io.SEEK_END)
        if not 0 <= info.offset <= info.offset + info.length <= end:  # an allocation that damage asks for
            return None
        file.seek(info.offset)
        with memory_for(full_path, info.length):
            data = file.read(info.length)
    return chunk_from(data, full_path)
