"""xxh3_128 of files, streams and tensors: faster than any disk here, and wide enough never to collide by chance.

It detects accidents, not forgery: who can write the files can write the manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from holdfast.files import RegularFile

HASH_BLOCK = 2**22

Moved = Callable[[int], object]
"""Called with the size of each block that was written or hashed, so that a waiting caller sees progress."""


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the hash of bytes."""
    return str(xxhash.xxh3_128_hexdigest(data))


def hash_tensor(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes in row-major order, whatever device or strides it has."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    # Memory that `Tensor.numpy` has shown once can never be given away again, as parallel/host_memory.py does.
    return str(xxhash.xxh3_128_hexdigest(np.from_dlpack(data).data))


def hash_file(path: Path, *, from_disk: bool = False, moved: Moved = lambda _: None) -> str:
    """Return the hash of a file.

    Args:
        path: The file.
        moved: Called with the size of every block.
        from_disk: Whether to drop the file's pages from the page cache first, so that the bytes come from the disk. The
            kernel may refuse.
    """
    digest = xxhash.xxh3_128()
    with RegularFile(path) as file:
        if from_disk:
            with contextlib.suppress(OSError, AttributeError):
                # Only clean pages are dropped, so the file must have been fsynced. Without this, a read-back would
                # compare the hash with memory, and a disk that stored other bytes would pass.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(HASH_BLOCK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            moved(count)
    return digest.hexdigest()


def hash_range(file: IO[bytes], start: int, size: int, into: memoryview | None = None) -> str:
    """Return the hash of `size` bytes of a file from an offset, or of as many as there are.

    Args:
        file: Open for reading.
        start, size: The range, in bytes.
        into: Memory of this size, which receives the bytes in the same pass; None: they are only hashed.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(size, HASH_BLOCK))) if into is None else into
    if file.tell() != start:
        file.seek(start)
    done = 0
    while done < size:
        first = 0 if into is None else done
        part = block[first : first + min(size - done, HASH_BLOCK)]
        count = file.readinto(part)  # type: ignore[attr-defined]
        if not count:
            break
        digest.update(part[:count])
        done += count
    return digest.hexdigest()


class HashingWriter(io.RawIOBase):
    """A writable stream that hashes bytes and writes them to a file."""

    def __init__(self, file: IO[bytes], moved: Moved = lambda _: None) -> None:
        self._file = file
        self._moved = moved
        self._digest = xxhash.xxh3_128()
        self.bytes_written = 0

    def write(self, data: Any) -> int:
        """Write and hash all bytes; return how many."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), HASH_BLOCK):
            block = view[start : start + HASH_BLOCK]
            self._digest.update(block)
            self._file.write(block)
            self.bytes_written += len(block)
            self._moved(len(block))
        return len(view)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.bytes_written

    def flush(self) -> None:
        """Flush the file below."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Return the file's descriptor, for fsync."""
        return self._file.fileno()

    def hexdigest(self) -> str:
        """Return the hash of everything written."""
        return self._digest.hexdigest()


def combined(hashes: Iterable[str]) -> str:
    """Return one hash of many, in order."""
    digest = xxhash.xxh3_128()
    for hex_digest in hashes:
        digest.update(hex_digest.encode())
    return digest.hexdigest()
