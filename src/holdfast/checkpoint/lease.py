"""One job per place of checkpoints: two jobs in one directory would both report success and mix their shards."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from holdfast.checkpoint.errors import DirectoryTaken, SaveFailed
from holdfast.checkpoint.layout import FOLDER, LEASE
from holdfast.checkpoint.renewal import STALE_SECONDS, Renewed
from holdfast.checkpoint.storage import LocalStorage

_WIDTH = 512


class Lease(Renewed):
    """Held by rank 0 for the length of a block.

    A lock on the file holds within a machine and dies with the process. Network file systems may not pass it on to
    other machines, so the file also names its holder and is renewed while the run goes on. Its age is told by the file
    system's own clock: those of two machines may differ, and either may jump.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__("holdfast-lease")
        self._path = directory / LEASE
        self._storage = LocalStorage(directory)
        # What users call it: the run's directory, or the place of checkpoints that has a name of its own.
        self._place = directory.parent if directory.name == FOLDER else directory
        self._file: IO[str] | None = None

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
        locked = self._lock(file)
        holder = self._holder(file)
        here = holder.get("host") == socket.gethostname()
        # Without locks, and on other machines, the holder's name and age decide.
        unlocked = "host" in holder and (not here or (locked is None and _lives(holder)))
        if locked is False or (unlocked and self._storage.age(LEASE) < STALE_SECONDS):
            file.close()
            raise DirectoryTaken(taken(str(self._place), holder))
        self._file = file
        self._renew()
        self._begin()
        return self

    def _give_back(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
            self._file.close()
            self._file = None

    def check(self) -> None:
        """Refuse to go on where the directory is another one by now: a save would make a new one in its old place.

        Raises:
            SaveFailed: It was moved, deleted or replaced while it was held.
        """
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        held = os.fstat(self._file.fileno())
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            place = self._place
            raise SaveFailed(
                f"{place} was moved, deleted or replaced while its run goes on, so nothing more can be saved. Put "
                f"it back as {place} and start the same command again: it continues from the newest checkpoint in it."
            )

    def _renew(self) -> None:
        assert self._file is not None
        # In place and of one width: a file that is emptied first stays empty on a full disk, and names nobody.
        os.pwrite(self._file.fileno(), holder_text().ljust(_WIDTH), 0)

    def _lock(self, file: IO[str]) -> bool | None:
        """Lock the file; return whether that was possible, None on a file system without locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _holder(self, file: IO[str]) -> dict[str, Any]:
        file.seek(0)
        try:
            held: dict[str, Any] = json.loads(file.read() or "{}")
        except ValueError:
            return {}
        return held


def holder_text(**more: Any) -> bytes:
    """Return who holds a lease, as it is written down."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **more}).encode()


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the holder is another process of this machine that goes on."""
    return holder.get("pid") != os.getpid() and Path(f"/proc/{holder.get('pid')}").exists()


def taken(place: str, holder: dict[str, Any]) -> str:
    """Return the words for a place that another job holds."""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
    return (
        f"{place} is in use by another job ({who}). Wait for it, stop it, or choose another run.name, and another "
        "checkpoint.storage if that is set."
    )
