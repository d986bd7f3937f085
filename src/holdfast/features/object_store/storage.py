"""Checkpoints in an object store, where a folder gets its name by a reference.

    step-00000200.ref              names the prefix of the folder step-00000200
    step-00000200.save-1a2b3c4d/   what one save has uploaded; the folder .staging-step-00000200-1a2b3c4d until then
    step-00000100/                 a folder that was uploaded by other means; it needs no reference

Objects cannot be renamed, but a single object appears whole or not at all, and can be written only if none is there. So
a rename is the upload of a reference under that condition, after which the earlier reference is deleted; no other
object is copied or moved. A prefix belongs to one save, so what two jobs upload never mixes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

from holdfast.checkpoint.place.hashing import HashingWriter, hash_bytes
from holdfast.checkpoint.place.layout import STAGING
from holdfast.checkpoint.place.storage import NOTHING, Storage
from holdfast.features.object_store.bucket import Bucket, FsspecBucket
from holdfast.files import REGULAR

_REFERENCE = ".ref"
_STAGED = re.compile(re.escape(STAGING) + r"(.+)-([0-9a-f]{8})")
_SAVE = re.compile(r"(.+)\.save-([0-9a-f]{8})")
_PREFIX = "a prefix"


class _References(NamedTuple):
    """References of a bucket at some moment."""

    prefixes: dict[str, str]
    """Prefix by the name of the folder."""
    unread: list[str]
    """Names of folders whose reference could not be read; any prefix may be theirs."""

    def may_name(self, folder: str) -> bool:
        """Return whether a reference that was not read may name an uploaded folder: its own name is made of it."""
        return any(folder in name for name in self.unread)


class ObjectStorage(Storage):
    """A prefix of an object store, such as s3://bucket/run/checkpoints.

    Args:
        url: Its URL.
        bucket: Answers requests; default: the store of the URL.

    Raises:
        ConfigError: No library here speaks the URL's protocol.
    """

    def __init__(self, url: str, bucket: Bucket | None = None) -> None:
        super().__init__(url.rstrip("/"))
        self._bucket = bucket or FsspecBucket(url)

    def _prefix(self, folder: str) -> str:
        """Return the prefix that holds the files of a folder, whether or not it exists.

        Raises:
            OSError: The folder's reference is damaged.
        """
        if staged := _STAGED.fullmatch(folder):
            return f"{staged[1]}.save-{staged[2]}"
        prefix = self._referenced(folder)
        if prefix is not None:
            return prefix
        # An uploaded folder that was put aside is referenced under a name that is made of its own, and has no other.
        entries = self._bucket.entries("")
        if folder not in entries:
            return folder
        references = self._references([entry for entry in entries if folder in entry])
        if references.may_name(folder):
            raise OSError(errno.EIO, f"a reference in {self.root}, of {references.unread[0]}, cannot be read")
        return f"{folder}{_REFERENCE}" if folder in references.prefixes.values() else folder

    def _referenced(self, folder: str) -> str | None:
        """Return the prefix that a folder's reference names; None if it has none."""
        try:
            text = self._bucket.get(folder + _REFERENCE)
        except FileNotFoundError:
            return None
        prefix, _, digest = text.decode(errors="replace").rstrip().partition(" ")
        if hash_bytes(prefix.encode()) != digest:
            raise OSError(
                errno.EIO,
                f"{self.root}/{folder}{_REFERENCE} is damaged. Copy the prefix that it named, such as "
                f"step-00000200.save-1a2b3c4d, to {folder}, and then delete it",
            )
        return prefix

    def _references(self, entries: list[str]) -> _References:
        prefixes, unread = {}, []
        for folder in (entry.removesuffix(_REFERENCE) for entry in entries if entry.endswith(_REFERENCE)):
            try:
                prefix = self._referenced(folder)
            except OSError:
                prefix = None
            if prefix is None:
                unread.append(folder)
            else:
                prefixes[folder] = prefix
        return _References(prefixes, unread)

    def _object(self, path: str) -> str:
        """Return the name of the object, or prefix, at a path; only folders have references."""
        folder, slash, below = path.partition("/")
        return f"{self._prefix(folder)}/{below}" if slash else folder

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        """Upload an object; it exists once the block has ended without an error."""
        with self._bucket.upload(self._object(path)) as file:
            yield HashingWriter(file, self._note_moved)

    def open(self, path: str) -> IO[bytes]:
        """Open for reading."""
        return self._bucket.download(self._object(path))

    def read(self, path: str) -> bytes:
        """Return the bytes, by one request for the file."""
        return self._bucket.get(self._object(path))

    def kind(self, path: str) -> str:
        """Describe what exists at a path: an object is a regular file."""
        if path and self._bucket.has(self._object(path)):
            return REGULAR
        if path and "/" not in path and self._bucket.has(path + _REFERENCE):
            return _PREFIX
        return _PREFIX if self.names(path) else NOTHING

    def names(self, path: str = "") -> list[str]:
        """Return sorted names; what a save has uploaded and no reference names is a staging folder."""
        if path:
            return self._bucket.entries(self._object(path) if "/" in path else self._prefix(path))
        entries = self._bucket.entries("")
        references = self._references(entries)
        shown = set()
        for entry in entries:
            if entry.endswith(_REFERENCE):
                shown.add(entry.removesuffix(_REFERENCE))
            elif entry in references.prefixes.values():
                continue
            elif save := _SAVE.fullmatch(entry):
                if not references.unread:
                    shown.add(f"{STAGING}{save[1]}-{save[2]}")
            elif not references.may_name(entry):
                shown.add(entry)
        return sorted(shown)

    def files(self, path: str) -> list[str]:
        """Return the sorted objects below a folder."""
        return self._bucket.below(self._object(path) if "/" in path else self._prefix(path))

    def make(self, path: str) -> None:
        """Do nothing: a prefix exists with its first object."""

    def sync(self, path: str) -> None:
        """Do nothing: an uploaded object is durable."""

    def put_new(self, path: str, data: bytes) -> None:
        """Upload an object only if there is none."""
        self._bucket.put_new(self._object(path), data)

    def replace(self, path: str, data: bytes) -> None:
        """Upload an object, whatever was there."""
        self._bucket.put(self._object(path), data)

    def overwrite(self, path: str, data: bytes) -> None:
        """Upload an object, whatever was there."""
        self.replace(path, data)

    def rename(self, old: str, new: str) -> None:
        """Put a reference under the new name, and then delete that of the old one."""
        prefix = self._prefix(old)
        if not (self._bucket.entries(prefix) or self._bucket.has(old + _REFERENCE)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.root}/{old}")
        if self.exists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.root}/{new}")
        self._bucket.put_new(new + _REFERENCE, f"{prefix} {hash_bytes(prefix.encode())}\n".encode())
        if not _STAGED.fullmatch(old):
            self._bucket.delete([old + _REFERENCE])

    def remove(self, path: str) -> None:
        """Delete an object, all below a prefix, or a folder; its files stay while another reference names them."""
        if "/" in path:
            name = self._object(path)
            self._bucket.delete([name, *(f"{name}/{below}" for below in self._bucket.below(name))])
            return
        if self._bucket.has(path):
            self._bucket.delete([path])
            return
        prefix, own = self._prefix(path), path + _REFERENCE
        others = self._references([entry for entry in self._bucket.entries("") if entry != own])
        if not others.unread and prefix not in others.prefixes.values():
            # The manifest goes first. The reference goes last: an uploaded folder would have its name back without it.
            names = self._bucket.below(prefix)
            for deep in (False, True):
                self._bucket.delete([f"{prefix}/{name}" for name in names if ("/" in name) is deep])
        self._bucket.delete([own])

    def age(self, path: str) -> float:
        """Return the age of an object in seconds."""
        return self._bucket.age(self._object(path))

    def lacks(self, path: str, size: int) -> str | None:  # noqa: ARG002 - the interface's
        """Return None: object stores do not report free space."""
        return None

    def free_bytes(self) -> int | None:
        """Return None: object stores do not report free space."""
        return None
