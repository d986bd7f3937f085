"""Scratch folders of judged code, and their removal whatever the code has built in them. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "holdfast-code-"
# O_NOFOLLOW refuses a symbolic link, by which judged code could direct the removal to a folder outside of its own.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DEEPEST = 200
"""Nesting depth of open folders during a removal; each level holds a file descriptor."""
_YOUNG_FOLDER_SECONDS = 60.0
"""Age below which a judged program's folder without a lock may be one that is being made."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder and remove it afterwards; if this process is killed, `remove_abandoned` removes it later."""
    outer = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    # The kernel releases a lock of a process that is killed, so that a folder without a lock is known to be abandoned.
    lock = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The code's own is an inner one: it may rename and lock what it can name.
        (outer / "work").mkdir()
        yield outer / "work"
    finally:
        remove_tree(outer)
        os.close(lock)


def remove_of(pid: int) -> None:
    """Remove the folders of a process that has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{pid}-*"):
        _remove_if_free(folder)


def remove_abandoned() -> None:
    """Remove the folders of processes that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _YOUNG_FOLDER_SECONDS:
                _remove_if_free(folder)


def _remove_if_free(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's, or in use
        lock = os.open(folder, _FOLDER)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
        finally:
            os.close(lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder of any depth; entries that the system refuses to remove are left.

    Python's recursion ends at a thousand levels and a path at 4,096 bytes, so folders that lie too deep are first moved
    to the top and emptied there.
    """
    try:
        top = os.open(folder, _FOLDER)
    except OSError:
        return
    removal = _Removal(top)
    try:
        removal.empty(top, 0)
        while removal.moved:
            removal.remove(top, removal.moved.pop(), 0)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        folder.rmdir()


class _Removal:
    """Removes the contents of an open folder; folders that lie too deep are queued in `moved`."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._names = (f"{_PREFIX}{os.getpid()}-{number}" for number in itertools.count())
        self.moved: list[str] = []
        """Names of folders that were moved to the top and are still to be emptied."""

    def empty(self, opened: int, depth: int) -> None:
        for name in os.listdir(opened):
            with contextlib.suppress(OSError):
                if not stat.S_ISDIR(os.lstat(name, dir_fd=opened).st_mode):
                    # Relative to open folders and never by path: judged code may exchange a folder for a link while it
                    # is being removed.
                    os.unlink(name, dir_fd=opened)
                    continue
                os.chmod(name, 0o700, dir_fd=opened)  # one closed to its owner can be neither moved nor read
                if depth < _DEEPEST:
                    self.remove(opened, name, depth)
                    continue
                new = next(self._names)
                os.rename(name, new, src_dir_fd=opened, dst_dir_fd=self._top)
                self.moved.append(new)

    def remove(self, parent: int, name: str, depth: int) -> None:
        with contextlib.suppress(OSError):
            opened = os.open(name, _FOLDER, dir_fd=parent)
            try:
                self.empty(opened, depth + 1)
            finally:
                os.close(opened)
            os.rmdir(name, dir_fd=parent)
