"""Storage of checkpoints: a directory, or a prefix of an object store. All paths are relative to its root.

A checkpoint is committed by renaming a staging directory whose files are durable. `features/object_store` renames by
putting a reference.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any

import xxhash

from holdfast import registry
from holdfast.checkpoint.place.hashing import HASH_BLOCK, HashingWriter, hash_file
from holdfast.files import (
    REGULAR,
    RegularFile,
    file_kind,
    is_there,
    naming,
    open_regular,
    raise_unless_absent,
    read_bytes,
    size_words,
)

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_SYNC_FILE_RANGE_WRITE = 2
_BEGIN_BYTES = 2**23
"""Write-back to the disk is started each time so many bytes of a file have been written."""


class Storage(ABC):
    """A tree of files; every effect of a checkpoint on a disk or a bucket is one of its abstract operations.

    Args:
        root: Path or URL, as a user would write it.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.moved_bytes = 0
        """Bytes written and hashed so far, a sign of progress of a running save."""

    @abstractmethod
    def create(self, path: str) -> contextlib.AbstractContextManager[HashingWriter]:
        """Open a new file for writing; it is durable when the block ends."""

    @abstractmethod
    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading, seekable."""

    @abstractmethod
    def kind(self, path: str) -> str:
        """Describe what exists at a path: `REGULAR`, "nothing", or words such as "a directory"."""

    @abstractmethod
    def names(self, path: str = "") -> list[str]:
        """Return the sorted names directly below a directory, none if it does not exist."""

    @abstractmethod
    def files(self, path: str) -> list[str]:
        """Return all files below a directory, sorted and relative to it."""

    @abstractmethod
    def make(self, path: str) -> None:
        """Create a directory that must not exist."""

    @abstractmethod
    def sync(self, path: str) -> None:
        """Make a directory's entries durable."""

    @abstractmethod
    def put_new(self, path: str, data: bytes) -> None:
        """Write a small file; raises FileExistsError if it is there."""

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Write a small file in one step, whatever was there."""

    @abstractmethod
    def overwrite(self, path: str, data: bytes) -> None:
        """Write other bytes of the same number into a small file; needs no space on a full disk, and may tear."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a directory in one step; raises FileExistsError rather than replace anything."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or a tree; what is gone already is not an error."""

    @abstractmethod
    def age(self, path: str) -> float:
        """Return the seconds since a file was written, by the storage's clock, from which a machine's may differ."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the bytes that this user may still write; None if unknown."""

    @abstractmethod
    def lacks(self, path: str, size: int) -> str | None:
        """Return why `size` bytes cannot be written, or None; `path` is a new file that may be created to find out."""

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        with self.open(path) as file:
            return file.read()

    def hash(self, path: str, *, from_disk: bool = False) -> str:  # noqa: ARG002 - where there is a cache of pages
        """Return the xxh3_128 of a file."""
        digest = xxhash.xxh3_128()
        with self.open(path) as file:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
                self._note_moved(len(block))
        return digest.hexdigest()

    def size(self, path: str) -> int:
        """Return a file's size."""
        with self.open(path) as file:
            return file.seek(0, io.SEEK_END)

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory."""
        return self.kind(path) != NOTHING

    def is_file(self, path: str) -> bool:
        """Return whether the path is a regular file, and no directory, pipe, device or link out of its tree."""
        return self.kind(path) == REGULAR

    def publish(self, staging: str, final: str) -> None:
        """Give a finished directory its name, durably; raises FileExistsError rather than replace anything."""
        self.rename(staging, final)
        self.sync("")

    def identity(self) -> object:
        """Return a value that differs once the root was moved, deleted or replaced; None where that cannot be."""
        return None

    def _note_moved(self, count: int) -> None:
        self.moved_bytes += count


NOTHING = "nothing"
"""Kind of a path at which there is none."""


def open_storage(path_or_url: str | Path) -> Storage:
    """Return the storage of a directory or of a URL such as s3://bucket/prefix."""
    text = str(path_or_url)
    if "://" in text and not text.startswith("file://"):
        storage: Storage = registry.load(registry.OBJECT_STORE)(text)
        return storage
    return LocalStorage(Path(text.removeprefix("file://")))


class LocalStorage(Storage):
    """A directory on a file system."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root

    def path(self, path: str) -> Path:
        """Return the path on this machine."""
        return self._root / path if path else self._root

    @contextmanager
    def create(self, path: str, *, sync: bool = True) -> Iterator[HashingWriter]:
        """Write a new file, flush it, and fsync it unless the caller does so later.

        Write-back is started while the file is being written, so that little is left for the fsync to wait for.
        """
        with RegularFile(self.path(path), "xb") as raw, io.BufferedWriter(raw) as file:
            begun = 0

            def moved(count: int) -> None:
                nonlocal begun
                self._note_moved(count)
                if writer.bytes_written - begun >= _BEGIN_BYTES:
                    begin_writeback(file.fileno(), begun, writer.bytes_written - begun)
                    begun = writer.bytes_written

            writer = HashingWriter(file, moved)
            yield writer
            if not file.closed:
                file.flush()
                if sync:
                    raw.sync()

    def open(self, path: str) -> IO[bytes]:
        """Open for reading."""
        return open_regular(self.path(path))

    def read(self, path: str) -> bytes:
        """Return the bytes."""
        return read_bytes(self.path(path))

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        """Return the hash."""
        return hash_file(self.path(path), from_disk=from_disk, moved=self._note_moved)

    def size(self, path: str) -> int:
        """Return the size."""
        return self.path(path).stat().st_size

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return is_there(self.path(path))

    def kind(self, path: str) -> str:
        """Describe what exists at a path; a link counts as a regular file if it stays below its first directory."""
        try:
            return file_kind(self.path(path), self.path(PurePath(path).parts[0]))
        except OSError as error:
            raise_unless_absent(error)
            return NOTHING

    def names(self, path: str = "") -> list[str]:
        """Return sorted names."""
        try:
            return sorted(os.listdir(self.path(path)))  # noqa: PTH208 - pathlib's would make a path of each
        except OSError as error:
            raise_unless_absent(error)
            return []

    def files(self, path: str) -> list[str]:
        """Return sorted files; a link is listed as itself and never followed out of the tree."""
        directory = self.path(path)
        files = []
        for folder, below, names in os.walk(directory, onerror=raise_unless_absent):
            linked = [name for name in below if (Path(folder) / name).is_symlink()]
            files += [str((Path(folder) / name).relative_to(directory)) for name in (*names, *linked)]
        return sorted(files)

    def make(self, path: str) -> None:
        """Create a directory, and the root if need be."""
        make_durably(self._root)
        self.path(path).mkdir(parents=True)

    def sync(self, path: str) -> None:
        """Fsync a directory."""
        # fsync of a file does not write the entry of its name; only fsync of the directory makes a rename survive a
        # power cut.
        descriptor = os.open(self.path(path), os.O_RDONLY)
        try:
            with naming(self.path(path)):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def put_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist, and the root if need be."""
        make_durably(self._root)
        try:
            with self.create(path) as file:
                file.write(data)
        except FileExistsError:
            raise
        except OSError:  # a disk without room holds the name of an empty file
            self.remove(path)
            raise

    def replace(self, path: str, data: bytes) -> None:
        """Write a temporary file, fsync it, rename it over the old one, and fsync the directory."""
        staging = f"{path}.{os.getpid()}"
        self.remove(staging)
        self.put_new(staging, data)
        # Without the fsync before it, a power cut after the rename can leave the new name with an empty file.
        self.path(staging).replace(self.path(path))
        self.sync(str(PurePath(path).parent))

    def overwrite(self, path: str, data: bytes) -> None:
        """Write in place."""
        with RegularFile(self.path(path), "rb+") as file:
            file.write(data)

    def identity(self) -> object:
        """Return the device and the inode of the root; an empty tuple if it is gone."""
        try:
            facts = self._root.stat()
        except FileNotFoundError:
            return ()
        return facts.st_dev, facts.st_ino

    def rename(self, old: str, new: str) -> None:
        """Rename."""
        rename_new(self.path(old), self.path(new))

    def remove(self, path: str) -> None:
        """Remove a file or tree, ignoring errors that network file systems return while others use the tree."""
        target = self.path(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target, ignore_errors=True)
        elif target.is_symlink() or is_there(target):  # a read-only disk refuses even to unlink nothing
            with contextlib.suppress(FileNotFoundError):
                target.unlink()

    def age(self, path: str) -> float:
        """Return the age of a file in seconds, compared with a temporary file that is created now."""
        written = self.path(path).stat().st_mtime
        with tempfile.TemporaryFile(dir=self.path(path).parent) as probe:
            return os.fstat(probe.fileno()).st_mtime - written

    def lacks(self, path: str, size: int) -> str | None:
        """Try to reserve the space with fallocate, which also respects quotas; without it, compare the free space."""
        free = self.free_bytes()
        if free is not None and free < size:
            return f"{size_words(free)} are free"
        libc = ctypes.CDLL(None, use_errno=True)
        with self.path(path).open("wb") as file:
            # Not os.posix_fallocate: where a file system cannot reserve, glibc emulates it by writing to every block.
            failed = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0
            number = ctypes.get_errno() if failed else 0
        self.path(path).unlink()
        # Anything else than a lack of space means that this file system cannot reserve, not that it is full.
        return os.strerror(number) if number in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else None

    def free_bytes(self) -> int | None:
        """Return the free space that the file system reports for ordinary users."""
        # statvfs needs an existing path, and the root may not have been created yet.
        folder = self._root
        while not folder.exists():
            folder = folder.parent
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize


def make_durably(directory: Path) -> None:
    """Create a directory and its missing parents, and fsync their parents, so that the names survive a power cut."""
    missing = [folder for folder in (directory, *directory.parents) if not is_there(folder)]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # one may write to a directory and not read it
            LocalStorage(folder.parent).sync("")


def rename_new(old: Path, new: Path) -> None:
    """Rename to a name that must be free; rename(2) alone would replace an empty directory.

    Raises:
        FileExistsError: The new name is taken.
    """
    if _renameat2(old, new, _RENAME_NOREPLACE):
        return
    if is_there(new):  # file systems without the flag; the run's lease keeps other jobs away
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    old.rename(new)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return False where the file system cannot."""
    return _renameat2(first, second, _RENAME_EXCHANGE)


def begin_writeback(descriptor: int, offset: int, count: int) -> None:
    """Start to write a range of a file to the disk without waiting; it is durable only after a later fsync.

    Does nothing on systems or file systems without sync_file_range; the fsync then writes everything.
    """
    call: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def _renameat2(old: Path, new: Path, flag: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    call: Any = getattr(libc, "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))
