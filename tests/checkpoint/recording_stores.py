"""Storages in memory that keep a journal of their effects: a disk, and a bucket of objects.

The bucket is the shipped storage above requests that are answered in memory; `test_recording_stores.py` compares disk
and requests with LocalStorage and FsspecBucket. `crash_states.py` makes of a journal what a crash can leave.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from holdfast.checkpoint.place.hashing import HashingWriter
from holdfast.checkpoint.place.storage import NOTHING, Storage
from holdfast.features.object_store import bucket
from holdfast.features.object_store.storage import ObjectStorage
from holdfast.files import REGULAR, NotRegular

ROOT = 0
"""Number of the folder that is the storage's root; it exists on the disk from the beginning."""


class Effect(NamedTuple):
    """One change of a disk or a bucket, or a note of the caller's between two changes."""

    kind: str
    """Disk: make, create, rename, leave, write, sync file, sync folder. Bucket: put, put new, delete. Else: note."""
    node: int = ROOT
    """Disk: the folder whose entry changes or is synced; the file that is written or synced. Bucket: the flight."""
    name: str = ""
    """Entry; of a rename the old one. Bucket: the object's name."""
    other: str = ""
    """New entry of a rename."""
    value: Any = None
    """Node of the entry; bytes of a write or of a put; what is noted."""


def absent(path: str) -> FileNotFoundError:
    """Return the system's error for a path that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def taken(path: str) -> FileExistsError:
    """Return the system's error for a path that is there."""
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


class Kept(io.BytesIO):
    """A file in memory whose bytes outlive it."""

    data = b""

    def close(self) -> None:
        if not self.closed:
            self.data = self.getvalue()
        super().close()


@dataclass
class Tree:
    """Folders by number, each with the numbers of its entries, and the bytes of files by number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    data: dict[int, bytes] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)
    """Time of the last write of each file."""
    seconds: float = 0.0
    """The file system's clock, which only tests set."""

    def copy(self) -> Tree:
        """Return a tree that changes alone."""
        folders = {number: dict(entries) for number, entries in self.folders.items()}
        return Tree(folders, dict(self.data), dict(self.written), self.seconds)

    def hold(self, effect: Effect) -> None:
        """Have the node that an effect makes, whether or not anything leads to it."""
        if effect.kind == "make":
            self.folders.setdefault(effect.value, {})
        elif effect.kind == "create":
            self.data.setdefault(effect.value, b"")

    def apply(self, effect: Effect) -> None:
        """Make a change; an entry leaves a folder only if it is still the one that left it then."""
        kind, node, name, other, value = effect
        if kind == "write":
            self.data[node] = value
            self.written[node] = self.seconds
            return
        entries = self.folders[node]
        match kind:
            case "make" | "create":
                self.hold(effect)
                entries[name] = value
            case "rename" | "leave":
                if entries.get(name) == value:
                    del entries[name]
                if kind == "rename":
                    entries[other] = value

    def files(self, folder: int = ROOT, before: str = "") -> dict[str, bytes]:
        """Return the bytes of all files below a folder by path."""
        files: dict[str, bytes] = {}
        for name, number in self.folders[folder].items():
            if number in self.folders:
                files |= self.files(number, f"{before}{name}/")
            else:
                files[before + name] = self.data[number]
        return files


class Recording:
    """What both storages in memory have: a journal, and turns."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.journal: list[Effect] = []
        self.turn: Callable[[], object] = lambda: None
        """Called before each operation; a scheduler lets another job go on in it."""

    def note(self, value: Any) -> None:
        """Write into the journal what the caller knows by then."""
        self.journal.append(Effect("note", value=value))


class Disk(Recording, Storage):
    """A file system, in which a power cut loses what was not synced.

    Bytes of a file are durable after fsync of the file, and entries of a folder (new names, renames, removals) after
    fsync of the folder, as POSIX has it. fsync of a file does not write its name, and none of a folder the bytes in it.
    ext4, XFS and btrfs promise more: their journals keep the order of changes of names, and an fsync takes all earlier
    ones with it. A rename happens whole or not at all, and the root and the names above it are durable.

    Args:
        tree: What is there, durably.
        first: Lowest number of a new node; two jobs that have one tree number theirs apart.
    """

    def __init__(self, tree: Tree | None = None, first: int = 1) -> None:
        super().__init__("(disk)")
        self.tree = tree or Tree()
        self._last = max([first - 1, *self.tree.folders, *self.tree.data])

    def _do(self, kind: str, node: int, name: str = "", other: str = "", value: Any = None) -> None:
        effect = Effect(kind, node, name, other, value)
        self.journal.append(effect)
        if not kind.startswith("sync"):
            self.tree.apply(effect)

    def _new(self) -> int:
        self._last += 1
        return self._last

    def _find(self, path: str) -> int:
        number = ROOT
        for name in path.split("/") if path not in {"", "."} else ():
            entries = self.tree.folders.get(number)
            if entries is None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in entries:
                raise absent(path)
            number = entries[name]
        return number

    def _place(self, path: str) -> tuple[int, str]:
        """Return the folder that a path's last name is in, and that name."""
        before, _, name = path.rpartition("/")
        folder = self._find(before)
        if folder not in self.tree.folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, name

    @contextmanager
    def create(self, path: str, *, sync: bool = True) -> Iterator[HashingWriter]:
        """Write a file, which is there, empty, while the block runs."""
        self.turn()
        folder, name = self._place(path)
        if name in self.tree.folders[folder]:
            raise taken(path)
        number = self._new()
        self._do("create", folder, name, value=number)
        file = Kept()
        try:
            yield HashingWriter(file, self._note_moved)
        except BaseException:
            sync = False
            raise
        finally:
            file.close()
            self._do("write", number, value=file.data)
            if sync:
                self.sync_file(number)

    def sync_file(self, number: int) -> None:
        """Fsync a file."""
        self._do("sync file", number)

    def open(self, path: str) -> IO[bytes]:
        return io.BytesIO(self.read(path))

    def read(self, path: str) -> bytes:
        self.turn()
        number = self._find(path)
        if number in self.tree.folders:
            raise NotRegular(errno.EINVAL, "it is a directory", path)
        return self.tree.data[number]

    def kind(self, path: str) -> str:
        self.turn()
        try:
            return "a directory" if self._find(path) in self.tree.folders else REGULAR
        except (FileNotFoundError, NotADirectoryError):
            return NOTHING

    def names(self, path: str = "") -> list[str]:
        return sorted(self.tree.folders.get(self._find(path), {})) if self.exists(path) else []

    def files(self, path: str) -> list[str]:
        return sorted(self.tree.files(self._find(path))) if self.exists(path) else []

    def make(self, path: str) -> None:
        self.turn()
        if self.exists(path):
            raise taken(path)
        folder = ROOT
        for name in path.split("/"):
            entries = self.tree.folders[folder]
            if name not in entries:
                self._do("make", folder, name, value=self._new())
            folder = entries[name]

    def sync(self, path: str) -> None:
        self.turn()
        self._do("sync folder", self._find(path))

    def put_new(self, path: str, data: bytes) -> None:
        with self.create(path) as file:
            file.write(data)

    def overwrite(self, path: str, data: bytes) -> None:
        self.turn()
        number = self._find(path)
        self._do("write", number, value=data + self.tree.data[number][len(data) :])

    def replace(self, path: str, data: bytes) -> None:
        staging = f"{path}.{os.getpid()}"
        self.remove(staging)
        self.put_new(staging, data)
        self._rename(staging, path)
        self.sync(path.rpartition("/")[0])

    def rename(self, old: str, new: str) -> None:
        self.turn()
        if self.exists(new):
            raise taken(old)
        self._rename(old, new)

    def _rename(self, old: str, new: str) -> None:
        folder, name = self._place(old)
        new_folder, new_name = self._place(new)
        assert folder == new_folder, "a rename into another folder has two entries that are synced apart"
        self._do("rename", folder, name, new_name, self._find(old))

    def remove(self, path: str) -> None:
        self.turn()
        if self.exists(path):
            self._remove(*self._place(path))

    def _remove(self, folder: int, name: str) -> None:
        number = self.tree.folders[folder].get(name)
        if number is None:  # another job was faster
            return
        for below in sorted(self.tree.folders.get(number, ())):
            self.turn()
            self._remove(number, below)
        self._do("leave", folder, name, value=number)

    def age(self, path: str) -> float:
        self.turn()
        return self.tree.seconds - self.tree.written.get(self._find(path), 0.0)

    def free_bytes(self) -> int | None:
        return None

    def lacks(self, path: str, size: int) -> str | None:  # noqa: ARG002 - the interface's
        return None


@dataclass
class Contents:
    """What all clients of a bucket see."""

    objects: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Time and number of the write of each object."""
    seconds: float = 0.0
    """The store's clock, which only tests set."""
    writes: int = 0

    def copy(self) -> Contents:
        """Return contents that change alone."""
        return Contents(dict(self.objects), dict(self.written), self.seconds, self.writes)

    def apply(self, effect: Effect) -> None:
        """Answer a request; one that puts a new object changes nothing where there is one."""
        if effect.kind == "delete":
            self.objects.pop(effect.name, None)
        elif effect.kind == "put" or effect.name not in self.objects:
            self.objects[effect.name] = effect.value
            self.writes += 1
            self.written[effect.name] = self.seconds, self.writes


class Requests(bucket.Bucket):
    """A client of a bucket, in which an object appears whole or not at all, and at once to everybody.

    A request waits for the answer to the one before it, except that the objects of one deletion are deleted in any
    order. `Effect.node` numbers the flights.

    Args:
        contents: What is there.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.recording: Recording
        self._flight = 0

    def _ask(self, kind: str, name: str, data: bytes | None = None) -> None:
        effect = Effect(kind, self._flight, name, value=data)
        self.recording.journal.append(effect)
        self.contents.apply(effect)

    @contextmanager
    def upload(self, name: str) -> Iterator[IO[bytes]]:
        file = Kept()
        yield file
        file.close()
        self.put(name, file.data)

    def download(self, name: str) -> IO[bytes]:
        return io.BytesIO(self.get(name))

    def get(self, name: str) -> bytes:
        self.recording.turn()
        if name not in self.contents.objects:
            raise absent(name)
        return self.contents.objects[name]

    def put(self, name: str, data: bytes) -> None:
        self.recording.turn()
        self._flight += 1
        self._ask("put", name, data)

    def put_new(self, name: str, data: bytes) -> None:
        self.recording.turn()
        if self.contents.objects.get(name, data) != data:
            raise taken(name)
        self._flight += 1
        self._ask("put new", name, data)

    def has(self, name: str) -> bool:
        self.recording.turn()
        return name in self.contents.objects

    def entries(self, prefix: str) -> list[str]:
        return sorted({name.split("/")[0] for name in self.below(prefix)})

    def below(self, prefix: str) -> list[str]:
        self.recording.turn()
        start = f"{prefix}/" if prefix else ""
        return sorted(name.removeprefix(start) for name in self.contents.objects if name.startswith(start))

    def delete(self, names: Sequence[str]) -> None:
        self._flight += 1
        for name in names:
            if name in self.contents.objects:
                self.recording.turn()
                self._ask("delete", name)

    def age(self, name: str) -> float:
        self.recording.turn()
        if name not in self.contents.objects:
            raise absent(name)
        return self.contents.seconds - self.contents.written[name][0]


class Bucket(Recording, ObjectStorage):
    """The shipped storage of a bucket in memory.

    Args:
        contents: What is there.
    """

    requests: type[Requests] = Requests

    def __init__(self, contents: Contents | None = None) -> None:
        self.contents = contents or Contents()
        asked = self.requests(self.contents)
        super().__init__("bucket://run", asked)
        asked.recording = self

    def files_of(self, name: str) -> dict[str, bytes]:
        """Return the files of a folder by path, without a request."""
        objects = self.contents.objects
        prefix = objects.get(f"{name}.ref", name.encode()).split(b" ")[0].decode()
        return {
            path.removeprefix(f"{prefix}/"): data for path, data in objects.items() if path.startswith(f"{prefix}/")
        }
