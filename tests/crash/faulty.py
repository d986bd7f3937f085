"""Storages with one fault: real files below, and at one named place a kill, an error or a lie."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.place.hashing import HashingWriter
from holdfast.checkpoint.place.layout import TENSORS
from holdfast.checkpoint.place.storage import LocalStorage

SHARD = ".safetensors"
"""End of the names of files of tensors."""


def die() -> None:
    """End this process as hard as the kernel can."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillingStorage(LocalStorage):
    """Kills its process at one place of one save.

    Args:
        root: The directory.
        place: "before a shard opens", "half a shard", "before the manifest", "half a manifest", "before the rename",
            "after the rename", "before the trash", "between two trashes" or "half a deletion".
        armed: Whether this rank dies.
    """

    def __init__(self, root: Path, place: str, *, armed: bool = False) -> None:
        super().__init__(root)
        self.place = place
        self.armed = armed

    def _die_at(self, *places: str) -> None:
        if self.armed and self.place in places:
            die()

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        file = "shard" if path.endswith(SHARD) else "manifest" if path.endswith(NAME) else ""
        self._die_at("before a shard opens" if file == "shard" else f"before the {file}")
        with super().create(path) as writer:
            yield writer
            if self.armed and self.place == f"half a {file}":
                writer.flush()
                os.truncate(self.path(path), writer.bytes_written // 2)
                die()

    def publish(self, staging: str, final: str) -> None:
        self._die_at("before the rename")
        self.rename(staging, final)
        self._die_at("after the rename")
        self.sync("")

    def rename(self, old: str, new: str) -> None:
        if new.startswith(".trash-"):
            self._die_at("before the trash")
        super().rename(old, new)
        if new.startswith(".trash-"):
            self._die_at("between two trashes")

    def remove(self, path: str) -> None:
        if path.startswith(".trash-") and self.armed and self.place == "half a deletion":
            shutil.rmtree(self.path(path) / TENSORS)
            die()
        super().remove(path)


class FullStorage(LocalStorage):
    """Writes part of a file, then says what a disk says; `free_bytes` knows nothing, as on a quota.

    Args:
        root: The directory.
        what: End of the paths that fail.
        number: The error.
        armed: Whether it fails on this rank.
    """

    def __init__(self, root: Path, what: str, number: int = errno.ENOSPC, *, armed: bool = True) -> None:
        super().__init__(root)
        self.what, self.number, self.armed = what, number, armed

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        with super().create(path) as writer:
            yield writer
            if self.armed and path.endswith(self.what):
                writer.flush()
                os.truncate(self.path(path), writer.bytes_written // 2)
                raise OSError(self.number, os.strerror(self.number), str(self.path(path)))

    def free_bytes(self) -> int | None:
        return None


class ShortStorage(LocalStorage):
    """Loses the end of a shard after it was closed without an error, as network file systems over quota do."""

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        with super().create(path) as writer:
            yield writer
        if path.endswith(SHARD):
            os.truncate(self.path(path), writer.bytes_written - 7)


class MoodyStorage(LocalStorage):
    """Reads that fail, or differ, for a while.

    Args:
        root: The directory.
        what: End of the paths this happens to.
        failures: Times that a read fails.
        number: The error; None: the hash of a file differs from read to read instead.
    """

    def __init__(self, root: Path, what: str, failures: int, number: int | None = errno.EIO) -> None:
        super().__init__(root)
        self.what, self.failures, self.number = what, failures, number
        self.renamed: list[str] = []

    def _fail(self, path: str) -> bool:
        if not path.endswith(self.what) or self.failures == 0:
            return False
        self.failures -= 1
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number), str(self.path(path)))
        return True

    def read(self, path: str) -> bytes:
        self._fail(path)
        return super().read(path)

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        return f"{time.monotonic_ns():032x}" if self._fail(path) else super().hash(path, from_disk=from_disk)

    def rename(self, old: str, new: str) -> None:
        self.renamed.append(old)
        super().rename(old, new)


class UnopenableStorage(MoodyStorage):
    """Files that cannot be opened for a while, although all of them can be hashed."""

    def open(self, path: str) -> IO[bytes]:
        self._fail(path)
        return super().open(path)


class SlowStorage(LocalStorage):
    """Waits before each shard, or other files, and tells when: a save that a test can catch in flight."""

    def __init__(self, root: Path, seconds: float, started: Path | None = None, what: str = SHARD) -> None:
        super().__init__(root)
        self.seconds, self.started, self.what = seconds, started, what

    @contextmanager
    def create(self, path: str) -> Iterator[Any]:
        if path.endswith(self.what):
            if self.started is not None:
                self.started.touch()
            time.sleep(self.seconds)
        with super().create(path) as writer:
            yield writer


class FlippingStorage(MoodyStorage):
    """Reads of a small file that come back with a bit flipped, each time another one or always the same.

    Args:
        root: The directory.
        what: End of the paths this happens to.
        failures: Times.
        same: The same bit each time.
        place: Of its byte.
    """

    def __init__(self, root: Path, what: str, failures: int, *, same: bool = False, place: int = len("{")) -> None:
        super().__init__(root, what, failures, None)
        self.same, self.place = same, place

    def read(self, path: str) -> bytes:
        place = self.place if self.same else self.failures
        data = bytearray(self.path(path).read_bytes())
        if self._fail(path):
            data[place] ^= 1
        return bytes(data)

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        return LocalStorage.hash(self, path, from_disk=from_disk)


class ForgetfulStorage(MoodyStorage):
    """Questions about a file, rather than its bytes, that fail, or are answered wrongly, for a while.

    Args:
        root: The directory.
        question: exists, is_file, size, files or names.
        what: End of the paths this happens to.
        failures: Times.
        number: The error; None: the answer is wrong instead.
    """

    def __init__(self, root: Path, question: str, what: str, failures: int, number: int | None = errno.EIO) -> None:
        super().__init__(root, what, failures, number)
        self.question = question

    def _asked(self, question: str, path: str) -> bool:
        return question == self.question and self._fail(path)

    def read(self, path: str) -> bytes:
        return LocalStorage.read(self, path)

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        return LocalStorage.hash(self, path, from_disk=from_disk)

    def exists(self, path: str) -> bool:
        return not self._asked("exists", path) and super().exists(path)

    def is_file(self, path: str) -> bool:
        return not self._asked("is_file", path) and super().is_file(path)

    def size(self, path: str) -> int:
        return super().size(path) + self._asked("size", path)

    def files(self, path: str) -> list[str]:
        return super().files(path)[self._asked("files", path) :]

    def names(self, path: str = "") -> list[str]:
        return super().names(path)[self._asked("names", path) :]


class FlippingFileStorage(LocalStorage):
    """A file that fails, or has another byte, the first times that it is opened.

    Args:
        root: The directory.
        what: End of the paths this happens to.
        failures: Times.
        place: Of the byte; None: opening fails instead.
    """

    def __init__(self, root: Path, what: str, failures: int, place: int | None) -> None:
        super().__init__(root)
        self.what, self.failures, self.place = what, failures, place

    def open(self, path: str) -> IO[bytes]:
        if not path.endswith(self.what) or self.failures == 0:
            return super().open(path)
        self.failures -= 1
        if self.place is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path(path)))
        data = bytearray(self.path(path).read_bytes())
        data[self.place] ^= 1
        return io.BytesIO(data)
