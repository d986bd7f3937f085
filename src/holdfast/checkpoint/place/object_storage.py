"""Checkpoints in an object store, through fsspec.

Objects cannot be renamed in one step, but a single object appears whole or not at all, and can be written only if none
is there. The manifest, uploaded last under that condition, is the commit.
"""

from __future__ import annotations

import errno
import io
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
import xxhash

from holdfast.checkpoint.place.hashing import HASH_BLOCK, HashingWriter
from holdfast.errors import ConfigError

_CLIENTS = {"aiobotocore", "aiohttp", "botocore"}
"""Libraries below s3fs whose errors, such as for missing credentials, do not derive from OSError."""


_TAKEN = "another job put this object, or a save that was killed"


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


class ObjectStorage:
    """A prefix such as s3://bucket/run/checkpoints."""

    renames = False

    def __init__(self, url: str) -> None:
        try:
            # fsspec caches listings by default, and would not see objects that other ranks and jobs have uploaded.
            self._fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}. For s3:// install holdfast[s3].") from error
        self._root = str(path).rstrip("/")
        self._url = url.rstrip("/")
        self._made: dict[str, object] = {}
        self.moved_bytes = 0

    @property
    def root(self) -> str:
        """The URL."""
        return self._url

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        """Upload a new object; it exists once the block has ended without an error.

        Raises:
            FileExistsError: There is one, with other bytes.
        """
        with _as_os_errors():
            file = self._fs.open(self._path(path), "xb")
            try:
                writer = HashingWriter(file, self._note_moved)
                yield writer
            except BaseException:
                discard = getattr(file, "discard", None)
                if discard is not None:
                    discard()
                raise
            try:
                file.close()
            except FileExistsError:
                if not self._is_ours(path, writer.bytes_written, writer.hexdigest()):
                    raise FileExistsError(errno.EEXIST, _TAKEN, self._url + f"/{path}") from None
            else:
                self._made[path] = self._version(path)

    def _is_ours(self, path: str, size: int, digest: str) -> bool:
        """Return whether the existing object has these bytes: clients repeat an upload whose response was lost."""
        return self.size(path) == size and self.hash(path) == digest

    @_as_os_errors()
    def open(self, path: str) -> IO[bytes]:
        """Open for reading."""
        return io.BufferedReader(_Object(self._fs.open(self._path(path), "rb")), HASH_BLOCK)

    @_as_os_errors()
    def read(self, path: str) -> bytes:
        """Return the bytes."""
        data: bytes = self._fs.cat_file(self._path(path))
        return data

    @_as_os_errors()
    def hash(self, path: str, *, from_disk: bool = False) -> str:  # noqa: ARG002 - every read crosses the network
        """Return the hash."""
        digest = xxhash.xxh3_128()
        with self.open(path) as file:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
                self._note_moved(len(block))
        return digest.hexdigest()

    def _note_moved(self, count: int) -> None:
        self.moved_bytes += count

    @_as_os_errors()
    def size(self, path: str) -> int:
        """Return the size."""
        return int(self._fs.info(self._path(path))["size"])

    @_as_os_errors()
    def exists(self, path: str) -> bool:
        """Return whether there is an object of this name or below this prefix."""
        return bool(self._fs.exists(self._path(path)))

    @_as_os_errors()
    def is_file(self, path: str) -> bool:
        """Return whether it is an object."""
        try:
            return bool(self._fs.info(self._path(path))["type"] == "file")
        except FileNotFoundError:  # isfile would take any other error for a no
            return False

    def kind(self, path: str) -> str:
        """Describe what exists under a name."""
        return "an object" if self.is_file(path) else "a prefix"

    @_as_os_errors()
    def names(self, path: str = "") -> list[str]:
        """Return sorted names."""
        if not self.exists(path):
            return []
        prefix = self._path(path) + "/"
        return sorted(
            {str(entry).removeprefix(prefix).split("/")[0] for entry in self._fs.ls(prefix, detail=False)} - {""}
        )

    @_as_os_errors()
    def files(self, path: str) -> list[str]:
        """Return sorted objects below a prefix."""
        prefix = self._path(path) + "/"
        return sorted(str(entry).removeprefix(prefix) for entry in self._fs.find(prefix))

    def make(self, path: str) -> None:
        """Do nothing: a prefix exists with its first object."""

    def sync(self, path: str) -> None:
        """Do nothing: an uploaded object is durable."""

    def publish(self, staging: str, final: str) -> None:
        """Never called: `renames` is False."""
        raise AssertionError((staging, final))

    @_as_os_errors()
    def put_new(self, path: str, data: bytes) -> None:
        """Upload an object only if there is none.

        Raises:
            FileExistsError: There is one, with other bytes.
        """
        try:
            self._fs.pipe_file(self._path(path), data, mode="create")
        except FileExistsError:
            if self.read(path) != data:  # else an answer was lost, and the upload was repeated
                raise

    @_as_os_errors()
    def replace(self, path: str, data: bytes) -> None:
        """Upload an object, whatever was there."""
        self._fs.pipe_file(self._path(path), data)

    @_as_os_errors()
    def rename(self, old: str, new: str) -> None:
        """Copy an object, or all below a prefix, and then delete the old names: no byte is ever without a name."""
        names = [""] if self.is_file(old) else [f"/{name}" for name in self.files(old)]
        for name in names:
            self._fs.cp_file(self._path(old + name), self._path(new + name))
        # One after the other, and what lies in no folder first: without its manifest the rest is not a checkpoint.
        for name in sorted(names, key=lambda name: name.count("/")):
            self.remove(old + name)

    @_as_os_errors()
    def remove(self, path: str) -> None:
        """Delete an object or everything below a prefix."""
        if self.exists(path):
            with suppress(FileNotFoundError):  # somebody else was faster
                self._fs.rm(self._path(path), recursive=True)

    @_as_os_errors()
    def undo(self, path: str, keep: Collection[str] = ()) -> None:
        """Remove the objects below a prefix that this process created, but for some of these."""
        for created in sorted(created for created in self._made if created.startswith(f"{path}/")):
            version = self._made.pop(created)
            if created.removeprefix(f"{path}/") in keep:
                continue
            with suppress(FileNotFoundError):
                if version == self._version(created):
                    self.remove(created)

    def kept(self, path: str) -> None:
        """Forget what was created below a prefix: it stays."""
        self._made = {created: version for created, version in self._made.items() if not created.startswith(f"{path}/")}

    def _version(self, path: str) -> object:
        """Return attributes that change when another object is uploaded under the same name."""
        info = self._fs.info(self._path(path))
        return [info.get(key) for key in ("ETag", "LastModified", "generation", "mtime", "size")]

    @_as_os_errors()
    def age(self, path: str) -> float:
        """Return the age of an object in seconds, compared with a probe that is uploaded now."""
        probe = f".now-{uuid.uuid4().hex}"
        self._fs.pipe_file(self._path(probe), b"now")
        try:
            written = self._fs.modified(self._path(path))
            return float((self._fs.modified(self._path(probe)) - written).total_seconds())
        finally:
            self.remove(probe)

    def lacks(self, path: str, size: int) -> str | None:  # noqa: ARG002 - the interface's
        """Return None: object stores do not report free space."""
        return None

    def free_bytes(self) -> int | None:
        """Return None: object stores do not report free space."""
        return None
