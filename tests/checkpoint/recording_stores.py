"""Storages in memory that keep a journal of their effects: a disk, and a bucket of objects.

They have the members of `holdfast.checkpoint.place.storage.Storage`; `test_recording_stores.py` compares them with
LocalStorage and ObjectStorage. `crash_states.py` makes of a journal what a crash can leave.
"""

from __future__ import annotations

import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from holdfast.checkpoint.place.hashing import HashingWriter, hash_bytes
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

    def copy(self) -> Tree:
        """Return a tree that changes alone."""
        return Tree({number: dict(entries) for number, entries in self.folders.items()}, dict(self.data))

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


class Recording(ABC):
    """A storage in memory whose effects stand in a journal."""

    def __init__(self) -> None:
        self.journal: list[Effect] = []
        self.moved_bytes = 0
        self.turn: Callable[[], object] = lambda: None
        """Called before each operation; a scheduler lets another job go on in it."""

    def note(self, value: Any) -> None:
        """Write into the journal what the caller knows by then."""
        self.journal.append(Effect("note", value=value))

    def _note_moved(self, count: int) -> None:
        self.moved_bytes += count

    def open(self, path: str) -> IO[bytes]:
        return io.BytesIO(self.read(path))

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    def hash(self, path: str, *, from_disk: bool = False) -> str:  # noqa: ARG002 - there is no cache
        data = self.read(path)
        self.moved_bytes += len(data)
        return hash_bytes(data)

    def size(self, path: str) -> int:
        return len(self.read(path))


class Disk(Recording):
    """A file system, in which a power cut loses what was not synced.

    Bytes of a file are durable after fsync of the file, and entries of a folder (new names, renames, removals) after
    fsync of the folder, as POSIX has it. fsync of a file does not write its name, and none of a folder the bytes in it.
    ext4, XFS and btrfs promise more: their journals keep the order of changes of names, and an fsync takes all earlier
    ones with it. A rename happens whole or not at all, and the root and the names above it are durable.

    Args:
        tree: What is there, durably.
        first: Lowest number of a new node; two jobs that have one tree number theirs apart.
    """

    renames = True
    root = "(disk)"

    def __init__(self, tree: Tree | None = None, first: int = 1) -> None:
        super().__init__()
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

    def read(self, path: str) -> bytes:
        self.turn()
        number = self._find(path)
        if number in self.tree.folders:
            raise NotRegular(errno.EINVAL, "it is a directory", path)
        return self.tree.data[number]

    def exists(self, path: str) -> bool:
        self.turn()
        try:
            self._find(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_file(self, path: str) -> bool:
        return self.kind(path) == REGULAR

    def kind(self, path: str) -> str:
        if not self.exists(path):
            return "nothing"
        return "a directory" if self._find(path) in self.tree.folders else REGULAR

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

    def publish(self, staging: str, final: str) -> None:
        self.rename(staging, final)
        self.sync("")

    def put_new(self, path: str, data: bytes) -> None:
        with self.create(path) as file:
            file.write(data)

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
        number = self.tree.folders[folder][name]
        for below in sorted(self.tree.folders.get(number, ())):
            self.turn()
            self._remove(number, below)
        self._do("leave", folder, name, value=number)

    def undo(self, path: str, keep: Collection[str] = ()) -> None:  # noqa: ARG002 - the interface's
        self.remove(path)

    def kept(self, path: str) -> None:
        pass

    def age(self, path: str) -> float:
        raise NotImplementedError(path)

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


class Bucket(Recording):
    """A client of a bucket, in which an object appears whole or not at all, and at once to everybody.

    A request waits for the answer to the one before it, except that all deletions below a prefix, and only these, are
    in flight together. `Effect.node` numbers the flights.

    Args:
        contents: What is there.
    """

    renames = False
    root = "bucket://run"

    def __init__(self, contents: Contents | None = None) -> None:
        super().__init__()
        self.contents = contents or Contents()
        self._made: dict[str, tuple[float, int]] = {}
        self._flight = 0

    def _ask(self, kind: str, name: str, data: bytes | None = None, *, together: bool = False) -> None:
        if not together:
            self._flight += 1
        effect = Effect(kind, self._flight, name, value=data)
        self.journal.append(effect)
        self.contents.apply(effect)

    @contextmanager
    def create(self, path: str) -> Iterator[HashingWriter]:
        file = Kept()
        yield HashingWriter(file, self._note_moved)
        file.close()
        self._put_new(path, file.data)
        self._made[path] = self.contents.written[path]

    def _put_new(self, path: str, data: bytes) -> None:
        self.turn()
        if self.contents.objects.get(path, data) != data:
            raise taken(path)
        self._ask("put new", path, data)

    def read(self, path: str) -> bytes:
        self.turn()
        if path not in self.contents.objects:
            raise absent(path)
        return self.contents.objects[path]

    def exists(self, path: str) -> bool:
        self.turn()
        return path in self.contents.objects or bool(self._below(path))

    def is_file(self, path: str) -> bool:
        self.turn()
        return path in self.contents.objects

    def kind(self, path: str) -> str:
        return "an object" if self.is_file(path) else "a prefix"

    def _below(self, path: str) -> list[str]:
        prefix = f"{path}/" if path else ""
        return sorted(name.removeprefix(prefix) for name in self.contents.objects if name.startswith(prefix))

    def names(self, path: str = "") -> list[str]:
        self.turn()
        return sorted({name.split("/")[0] for name in self._below(path)})

    def files(self, path: str) -> list[str]:
        self.turn()
        return self._below(path)

    def make(self, path: str) -> None:
        pass

    def sync(self, path: str) -> None:
        pass

    def publish(self, staging: str, final: str) -> None:
        raise AssertionError((staging, final))

    def put_new(self, path: str, data: bytes) -> None:
        self._put_new(path, data)

    def replace(self, path: str, data: bytes) -> None:
        self.turn()
        self._ask("put", path, data)

    def rename(self, old: str, new: str) -> None:
        names = [""] if self.is_file(old) else [f"/{name}" for name in self.files(old)]
        for name in names:
            self.replace(new + name, self.contents.objects[old + name])
        for name in sorted(names, key=lambda name: name.count("/")):
            self.remove(old + name)

    def remove(self, path: str) -> None:
        self.turn()
        names = [path] if path in self.contents.objects else [f"{path}/{name}" for name in self._below(path)]
        for place, name in enumerate(names):
            self._ask("delete", name, together=place > 0)

    def undo(self, path: str, keep: Collection[str] = ()) -> None:
        for name in sorted(name for name in self._made if name.startswith(f"{path}/")):
            written = self._made.pop(name)
            if (
                name.removeprefix(f"{path}/") not in keep
                and name in self.contents.objects
                and self.contents.written[name] == written
            ):
                self.remove(name)

    def kept(self, path: str) -> None:
        self._made = {name: written for name, written in self._made.items() if not name.startswith(f"{path}/")}

    def age(self, path: str) -> float:
        self.turn()
        if path not in self.contents.objects:
            raise absent(path)
        return self.contents.seconds - self.contents.written[path][0]

    def free_bytes(self) -> int | None:
        return None

    def lacks(self, path: str, size: int) -> str | None:  # noqa: ARG002 - the interface's
        return None
