"""Requests to an object store, through fsspec."""

from __future__ import annotations

import errno
import io
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any

import fsspec

from holdfast.checkpoint.place.hashing import HASH_BLOCK
from holdfast.errors import ConfigError

_CLIENTS = {"aiobotocore", "aiohttp", "botocore"}
"""Libraries below s3fs whose errors, such as for missing credentials, do not derive from OSError."""


class Bucket(ABC):
    """Objects by name below a prefix; each appears whole or not at all."""

    @abstractmethod
    def upload(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open an object for writing; it exists once the block has ended without an error."""

    @abstractmethod
    def download(self, name: str) -> IO[bytes]:
        """Open an object for reading, seekable."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return an object's bytes."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write an object, whatever was there."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> None:
        """Write an object only if there is none; raises FileExistsError if there is one with other bytes."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is an object of this name."""

    @abstractmethod
    def entries(self, prefix: str) -> list[str]:
        """Return the sorted names of objects and prefixes directly below a prefix, relative to it."""

    @abstractmethod
    def below(self, prefix: str) -> list[str]:
        """Return the sorted names of all objects below a prefix, relative to it."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, in any order; one that is gone already is not an error."""

    @abstractmethod
    def age(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock.

        Raises:
            NotImplementedError: The store does not tell.
        """


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn what the store's client raises into the errors that a file system's callers expect."""
    try:
        yield
    except Exception as error:
        if {base.__module__.split(".")[0] for base in type(error).__mro__}.isdisjoint(_CLIENTS):
            raise
        number = errno.EACCES if "Credential" in type(error).__name__ else errno.EIO
        raise OSError(number, f"{type(error).__name__}: {error}") from error


class _Object(io.RawIOBase):
    """A readable object of a store, whose errors in the middle of a read become OSErrors."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    @_as_os_errors()
    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @_as_os_errors()
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


class FsspecBucket(Bucket):
    """A prefix such as s3://bucket/run/checkpoints.

    Args:
        url: Its URL.

    Raises:
        ConfigError: No library here speaks its protocol.
    """

    def __init__(self, url: str) -> None:
        try:
            # fsspec caches listings by default, and would not see objects that other ranks and jobs have uploaded.
            self._fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}. For s3:// install holdfast[s3].") from error
        self._root = str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def upload(self, name: str) -> Iterator[IO[bytes]]:
        """Stream an object; an error in the block abandons it."""
        with _as_os_errors():
            file = self._fs.open(self._path(name), "wb")
            try:
                yield file
            except BaseException:
                discard = getattr(file, "discard", None)
                if discard is not None:
                    discard()
                    file.closed = True  # a file that was discarded cannot be closed, and would be when it is collected
                raise
            file.close()

    @_as_os_errors()
    def download(self, name: str) -> IO[bytes]:
        """Open for reading."""
        return io.BufferedReader(_Object(self._fs.open(self._path(name), "rb")), HASH_BLOCK)

    @_as_os_errors()
    def get(self, name: str) -> bytes:
        """Return the bytes."""
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    @_as_os_errors()
    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        self._fs.pipe_file(self._path(name), data)

    def put_new(self, name: str, data: bytes) -> None:
        """Write an object that must not exist."""
        try:
            with _as_os_errors():
                self._fs.pipe_file(self._path(name), data, mode="create")
        except OSError as error:
            # Stores word the refusal differently, and an answer may be lost of which the client repeated the request.
            try:
                there = self.get(name)
            except FileNotFoundError:
                raise error from None
            if there != data:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error

    @_as_os_errors()
    def has(self, name: str) -> bool:
        """Return whether it is an object."""
        try:
            return bool(self._fs.info(self._path(name))["type"] == "file")
        except FileNotFoundError:  # isfile would take any other error for a no
            return False

    @_as_os_errors()
    def entries(self, prefix: str) -> list[str]:
        """Return sorted names."""
        start = self._path(prefix) + "/"
        try:
            found = self._fs.ls(start, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(entry).removeprefix(start).split("/")[0] for entry in found} - {""})

    @_as_os_errors()
    def below(self, prefix: str) -> list[str]:
        """Return sorted names."""
        start = self._path(prefix) + "/"
        return sorted(str(entry).removeprefix(start) for entry in self._fs.find(start))

    @_as_os_errors()
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for name in names:
            with suppress(FileNotFoundError):
                # Not `rm`: it reads names as patterns, and s3fs's passes over the errors of single objects.
                self._fs.rm_file(self._path(name))

    @_as_os_errors()
    def age(self, name: str) -> float:
        """Return the age of an object in seconds, compared with a probe that is written now."""
        probe = f".now-{uuid.uuid4().hex}"
        self._fs.pipe_file(self._path(probe), b"now")
        try:
            written = self._fs.modified(self._path(name))
            return float((self._fs.modified(self._path(probe)) - written).total_seconds())
        finally:
            self.delete([probe])
