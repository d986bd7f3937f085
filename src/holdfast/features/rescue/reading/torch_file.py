"""Reads a file that torch.save wrote: an uncompressed zip archive of one pickle and one member per storage."""

from __future__ import annotations

import ctypes
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from torch import Tensor

from holdfast.checkpoint.place.memory import new_memory
from holdfast.features.rescue.reading.pickles import StoredView, unpickled
from holdfast.features.rescue.reading.record import DamagedFile
from holdfast.files import file_kind, open_regular

_BLOCK = 2**20
"""Bytes that are read at a time, so that they are still in the cache when their checksum is computed."""
_MOST_PICKLE = 2**30
"""No pickle of names and shapes is larger; a sparse file may claim any size."""
_SCALAR = 16
"""A storage of so few bytes may be a step counter, which every rank has alike."""
_LOCAL_HEADER = 30
"""Bytes of a member's header before its name, in the zip format."""


class _Member(NamedTuple):
    header: int
    size: int
    checksum: int
    """CRC-32; 0 where torch was told to leave it out."""


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
        self.has_checksums = any(member.checksum for member in self._members.values())
        order = self._bytes(f"{self._prefix}byteorder") if f"{self._prefix}byteorder" in self._members else b"little"
        if order != b"little":
            raise DamagedFile(f"holds numbers in {order!r} byte order")

    @property
    def written_as(self) -> str:
        """The name without its ending that torch.save was given; `archive` where it was given an open file."""
        return self._prefix.removesuffix("/")

    def _listed(self, file: IO[bytes]) -> dict[str, _Member]:
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
        members = {entry.filename: _Member(entry.header_offset, entry.file_size, entry.CRC) for entry in entries}
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

    def _bytes(self, name: str) -> bytes:
        begin, size = self._member_range(name)
        with open_regular(self.path) as file:
            file.seek(begin)
            data = file.read(size)
        if len(data) != size:
            raise DamagedFile(f"is cut short in {name}")
        if self.has_checksums and zlib.crc32(data) != self._members[name].checksum:
            raise DamagedFile(f"is damaged: the checksum of {name} does not fit")
        return data

    def _member_range(self, name: str) -> tuple[int, int]:
        """Return where in the file a member's bytes begin, and how many there are."""
        member = self._members.get(name)
        if member is None:
            raise DamagedFile(f"lacks {name}, the numbers of a tensor")
        begin = self._begin + member.header
        with open_regular(self.path) as file:
            file.seek(begin)
            header = file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
            raise DamagedFile(f"is damaged where {name} begins")
        start = (
            begin + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        if start + member.size > self._begin + self._length:
            raise DamagedFile(f"is cut short in {name}")
        return start, member.size

    def value(self, extra: Mapping[str, Any] | None = None) -> Any:
        """Return what the pickle holds, tensors as `StoredView`.

        Raises:
            DamagedFile: As `pickles.unpickled`.
        """
        name = f"{self._prefix}data.pkl"
        if self._members[name].size > _MOST_PICKLE:
            raise DamagedFile(
                f"claims a pickle of {self._members[name].size:,} bytes, larger than any of tensors' names"
            )
        return unpickled(self._bytes(name), extra)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...] | None:
        """Return the sizes and checksums of all members; None where torch left checksums out, or nothing is stored."""
        numbers = [member for name, member in self._members.items() if "/data/" in name]
        if not any(member.size > _SCALAR and member.checksum for member in numbers):
            return None
        entries = (
            (name.removeprefix(self._prefix), entry.size, entry.checksum) for name, entry in self._members.items()
        )
        return tuple(sorted(entries))

    def check(self, view: StoredView) -> None:
        """Compare the size of a storage with what its tensor needs; nothing is read.

        Raises:
            DamagedFile: It is missing or has another size.
        """
        name = f"{self._prefix}data/{view.storage}"
        member = self._members.get(name)
        if member is None:
            raise DamagedFile(f"lacks {name}, the numbers of a tensor")
        if member.size < view.count * view.dtype.itemsize:
            raise DamagedFile(
                f"holds {member.size} bytes in {name}, where {view.count * view.dtype.itemsize} are meant"
            )

    def fill(self, view: StoredView, target: Tensor) -> None:
        """Read a tensor's numbers into memory that is there, and compare its storage with the archive's checksum.

        Args:
            view: The tensor.
            target: Of its shape and dtype.

        Raises:
            DamagedFile: The file lacks them, they are another tensor's, or they are damaged.
        """
        self.check(view)
        if tuple(target.shape) != view.shape or target.dtype != view.dtype:
            raise DamagedFile(f"holds {list(view.shape)} {view.dtype} in the place of {list(target.shape)} "
                              f"{target.dtype}")  # fmt: skip
        if 0 in view.shape:
            return
        span = sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True)) + 1
        if span == math.prod(view.shape) and _is_row_major(view) and target.is_contiguous():
            self._read(view, _memory_of(target))
            return
        flat = new_memory(str(self.path), (span,), view.dtype)
        self._read(view, _memory_of(flat))
        target.copy_(flat.as_strided(view.shape, view.strides))

    def _read(self, view: StoredView, target: memoryview) -> None:
        """Read the bytes from a tensor's first to its last element, block by block while they are in the cache.

        A checksum is of all of a storage. What stands around the tensor is read along with it where it is no more than
        the tensor, as the padding of FSDP2 is; of a storage that many tensors share, all is read once before the first.
        """
        begin, size = self._member_range(f"{self._prefix}data/{view.storage}")
        start = view.offset * view.dtype.itemsize
        trailing = size - start - len(target)
        if size <= 2 * len(target):
            self._compare(view.storage, begin, chain(_scratch(start), _blocks(target), _scratch(trailing)), target)
            return
        if view.storage not in self._compared:
            self._compare(view.storage, begin, _scratch(size))
        self._checksum(view.storage, begin + start, _blocks(target))

    def compare_rest(self) -> None:
        """Compare the storages that no tensor was read from.

        Raises:
            DamagedFile: One of them does not fit its checksum.
        """
        begin = f"{self._prefix}data/"
        for name in self._members:
            storage = name.removeprefix(begin)
            if name.startswith(begin) and storage not in self._compared:
                self._compare(storage, self._member_range(name)[0], _scratch(self._members[name].size))

    def _compare(
        self, storage: str, begin: int, blocks: Iterable[memoryview], target: memoryview | None = None
    ) -> None:
        """Read all of a storage into blocks and compare it with the archive's checksum."""
        checksum = self._checksum(storage, begin, blocks)
        if self.has_checksums and checksum != self._members[f"{self._prefix}data/{storage}"].checksum:
            is_empty = target is not None and not np.frombuffer(target, np.uint8).any()
            empty = " and only zeros are there" if is_empty else ""
            raise DamagedFile(f"is damaged: the checksum of storage {storage} does not fit{empty}")
        self._compared.add(storage)

    def _checksum(self, storage: str, begin: int, blocks: Iterable[memoryview]) -> int:
        """Fill blocks with the bytes from a position on; return their CRC-32."""
        checksum = 0
        with open_regular(self.path) as file:
            file.seek(begin)
            for block in blocks:
                if file.readinto(block) != len(block):
                    raise DamagedFile(f"is cut short in the numbers of storage {storage}")
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


def _is_row_major(view: StoredView) -> bool:
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


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
