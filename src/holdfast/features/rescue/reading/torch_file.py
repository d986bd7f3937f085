"""Reads a file that torch.save wrote: an uncompressed zip archive of one pickle and one member per storage."""

from __future__ import annotations

import ctypes
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from holdfast.checkpoint.place.memory import new_memory
from holdfast.features.rescue.reading.pickles import storage_of, unpickled
from holdfast.features.rescue.reading.record import DamagedFile
from holdfast.files import file_kind, open_regular

_BLOCK = 2**20
"""Bytes that are read at a time, so that they are still in the cache when their checksum is computed."""
_MOST_PICKLE = 2**30
"""No pickle of names and shapes is larger; a sparse file may claim any size."""
_SCALAR = 16
"""A storage of so few bytes may be a step counter, which every rank has alike."""
_MOST_REPEATED = 2**24
"""Bytes of the largest tensor that may have more than its storage, as an expanded one does."""
_LOCAL_HEADER = 30
"""Bytes of a member's header before its name, in the zip format."""


class TorchFile:
    """The contents of one file; a tensor is read when it is requested.

    No byte is returned before all of its member was compared with the archive's checksum: the pickle when it is read,
    a storage the first time that any view of it is.
    """

    def __init__(self, path: Path, begin: int = 0, length: int | None = None, within: Path | None = None) -> None:
        """Look at the members; no tensor is read.

        Args:
            path: The file.
            begin: Where the archive begins in it.
            length: Of the archive; default: to the end of the file.
            within: A directory that a link must not lead out of.

        Raises:
            DamagedFile: It is cut short, compressed, or none of torch's.
        """
        self.path, self._begin = path, begin
        self._compared: set[str] = set()
        kind = file_kind(path, within)
        if kind != "a regular file":
            raise DamagedFile(f"is {kind}")
        with open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            self._length = end - begin if length is None else length
            if not 0 <= begin <= begin + self._length <= end:
                raise DamagedFile("is shorter than its list of contents says")
            self._members = self._listed(file)
        names = [name for name in self._members if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise DamagedFile("is no file of torch.save: there is no data.pkl in it")
        self._prefix = names[0].removesuffix("data.pkl")
        self.has_checksums = any(entry.CRC for entry in self._members.values())
        order = self._bytes("byteorder") if f"{self._prefix}byteorder" in self._members else b"little"
        if order != b"little":
            raise DamagedFile(f"holds numbers in {order!r} byte order")

    @property
    def written_as(self) -> str:
        """The name without its ending that torch.save was given; `archive` where it was given an open file."""
        return self._prefix.removesuffix("/")

    def _listed(self, file: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
        if self._length == 0:
            raise DamagedFile("is empty")
        try:
            with zipfile.ZipFile(_FileWindow(file, self._begin, self._length)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk, and not of what the archive asks for
            raise DamagedFile(self._no_archive(file, error)) from None
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise DamagedFile("holds compressed members, which torch never writes")
        if sum(entry.file_size for entry in entries) > self._length:
            raise DamagedFile("claims to hold more bytes than it has")
        members = {entry.filename: entry for entry in entries}
        if len(members) != len(entries):
            raise DamagedFile("holds two members of one name")
        return members

    def _no_archive(self, file: IO[bytes], error: Exception) -> str:
        file.seek(self._begin)
        start = file.read(64)
        if start.startswith(b"PK\x03\x04"):
            return f"is cut short: the list at its end is missing ({error})"
        if not any(start):
            return "holds zeros, as a file does whose bytes never reached the disk"
        if start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
            return "is in torch's format from before 1.6, or a pickle; load it with torch and save it again"
        return "is no file of torch.save"

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._members.get(self._prefix + name)
        if entry is None:
            raise DamagedFile(f"lacks {self._prefix}{name}, the numbers of a tensor")
        return entry

    def _bytes(self, name: str) -> bytes:
        data = bytearray(self._entry(name).file_size)
        if self._checksum(name, 0, [memoryview(data)]) != self._entry(name).CRC and self.has_checksums:
            raise DamagedFile(f"is damaged: the checksum of {name} does not fit")
        return bytes(data)

    def value(self) -> Any:
        """Return what the pickle holds, tensors on the meta device.

        Raises:
            DamagedFile: As `pickles.unpickled`.
        """
        size = self._entry("data.pkl").file_size
        if size > _MOST_PICKLE:
            raise DamagedFile(f"claims a pickle of {size:,} bytes, larger than any of tensors' names")
        return unpickled(self._bytes("data.pkl"))

    def fingerprint(self) -> tuple[tuple[str, int, int], ...] | None:
        """Return the sizes and checksums of all members; None where torch left checksums out, or nothing is stored."""
        entries = {
            name.removeprefix(self._prefix): (entry.file_size, entry.CRC) for name, entry in self._members.items()
        }
        if not any(size > _SCALAR and crc for name, (size, crc) in entries.items() if name.startswith("data/")):
            return None
        return tuple(sorted((name, *marks) for name, marks in entries.items()))

    def check(self, tensor: Tensor) -> None:
        """Compare the size of a storage with what its tensor needs; nothing is read.

        Raises:
            DamagedFile: It is missing or has another size, or the tensor has its numbers many times.
        """
        name = f"data/{storage_of(tensor)}"
        size, needed = self._entry(name).file_size, tensor.untyped_storage().nbytes()
        if size < needed:
            raise DamagedFile(f"holds {size} bytes in {self._prefix}{name}, where {needed} are meant")
        if tensor.numel() * tensor.element_size() > max(needed, _MOST_REPEATED):
            raise DamagedFile(f"repeats the numbers of {self._prefix}{name} in a tensor of {list(tensor.shape)}")

    def fill(self, tensor: Tensor, target: Tensor) -> None:
        """Read a tensor's numbers into memory that is there, and compare its storage with the archive's checksum.

        Args:
            tensor: As `value` returns it.
            target: Of its shape and dtype.

        Raises:
            DamagedFile: The file lacks them, they are another tensor's, or they are damaged.
        """
        self.check(tensor)
        if (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            raise DamagedFile(f"holds {list(tensor.shape)} {tensor.dtype} in the place of {list(target.shape)} "
                              f"{target.dtype}")  # fmt: skip
        if 0 in tensor.shape:
            return
        if tensor.is_contiguous() and target.is_contiguous():
            self._read(tensor, _memory_of(target))
            return
        span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = new_memory(str(self.path), (span,), tensor.dtype)
        self._read(tensor, _memory_of(flat))
        target.copy_(flat.as_strided(tensor.shape, tensor.stride()))

    def _read(self, tensor: Tensor, target: memoryview) -> None:
        """Read the bytes from a tensor's first to its last element, block by block while they are in the cache.

        A checksum is of all of a storage. What stands around the tensor is read along with it where it is no more than
        the tensor, as the padding of FSDP2 is; of a storage that many tensors share, all is read once before the first.
        """
        name, start = f"data/{storage_of(tensor)}", int(tensor.storage_offset()) * tensor.element_size()
        size = self._entry(name).file_size
        trailing = size - start - len(target)
        if trailing < 0:
            raise DamagedFile("holds a tensor that goes beyond its storage")
        if size <= 2 * len(target):
            self._compare(name, chain(_scratch(start), _blocks(target), _scratch(trailing)), target)
            return
        if name not in self._compared:
            self._compare(name, _scratch(size))
        self._checksum(name, start, _blocks(target))

    def compare_rest(self) -> None:
        """Compare the storages that no tensor was read from.

        Raises:
            DamagedFile: One of them does not fit its checksum.
        """
        for member, entry in self._members.items():
            name = member.removeprefix(self._prefix)
            if name.startswith("data/") and name not in self._compared:
                self._compare(name, _scratch(entry.file_size))

    def _compare(self, name: str, blocks: Iterable[memoryview], target: memoryview | None = None) -> None:
        """Read all of a storage into blocks and compare it with the archive's checksum."""
        if self._checksum(name, 0, blocks) != self._entry(name).CRC and self.has_checksums:
            is_empty = target is not None and not np.frombuffer(target, np.uint8).any()
            storage, empty = name.removeprefix("data/"), " and only zeros are there" if is_empty else ""
            raise DamagedFile(f"is damaged: the checksum of storage {storage} does not fit{empty}")
        self._compared.add(name)

    def _checksum(self, name: str, start: int, blocks: Iterable[memoryview]) -> int:
        """Fill blocks with the bytes of a member from a position on; return their CRC-32."""
        checksum, header = 0, self._begin + self._entry(name).header_offset
        with open_regular(self.path) as file:
            file.seek(header)
            local = file.read(_LOCAL_HEADER)
            if len(local) < _LOCAL_HEADER or not local.startswith(b"PK\x03\x04"):
                raise DamagedFile(f"is damaged where {name} begins")
            names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            file.seek(header + _LOCAL_HEADER + names + start)
            for block in blocks:
                if file.readinto(block) != len(block):
                    raise DamagedFile(f"is cut short in {name}")
                checksum = zlib.crc32(block, checksum)
        return checksum


def _blocks(target: memoryview) -> Iterator[memoryview]:
    return (target[start : start + _BLOCK] for start in range(0, len(target), _BLOCK))


def _scratch(count: int) -> Iterator[memoryview]:
    """Yield memory for so many bytes, the same again and again."""
    block = memoryview(bytearray(min(count, _BLOCK)))
    return (block[: min(_BLOCK, count - start)] for start in range(0, count, _BLOCK))


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, to be written to while it lives.

    `Tensor.numpy` would do, and make its memory one that can never be given back before the tensor dies.
    """
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


class _FileWindow:
    """A range of a file that behaves like a file, for zipfile."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def seekable(self) -> bool:
        """Return True: zipfile seeks."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position and return it."""
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        if self._at < 0:
            raise OSError("negative seek")  # as a file says; zipfile takes it for the end of its search
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        remaining = max(0, self._length - self._at)
        self._file.seek(self._begin + self._at)
        data = self._file.read(remaining if size < 0 else min(size, remaining))
        self._at += len(data)
        return data
