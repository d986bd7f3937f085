"""One job per place of checkpoints: two jobs in one directory would both report success and mix their shards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from holdfast.checkpoint.errors import DirectoryTaken, SaveFailed
from holdfast.checkpoint.layout import FOLDER, LEASE
from holdfast.checkpoint.storage import Storage

STALE_SECONDS = 120.0
"""A lease of another host that was not renewed for this long is dead."""
RENEW_SECONDS = 15.0


class Lease:
    """Held by rank 0 for the length of a block.

    A lock on the file holds within a machine and dies with the process. Network file systems may not pass it on to
    other machines, so the file also names its holder and is renewed while the run goes on. Its age is told by the file
    system's own clock: those of two machines may differ, and either may jump.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LEASE
        # What users call it: the run's directory, or the place of checkpoints that has a name of its own.
        self._place = directory.parent if directory.name == FOLDER else directory
        self._file: IO[str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        locked = self._lock(file)
        holder = self._holder(file)
        here = holder.get("host") == socket.gethostname()
        # Without locks, and on other machines, the holder's name and age decide.
        unlocked = "host" in holder and (not here or (locked is None and _lives(holder)))
        if locked is False or (unlocked and self._age(file) < STALE_SECONDS):
            file.close()
            raise DirectoryTaken(_taken(str(self._place), holder))
        self._file = file
        self._renew()
        self._thread = threading.Thread(target=self._keep_renewing, name="holdfast-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
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

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the next time may do better; a dead file system stops the saves
                self._renew()

    def _renew(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(_holder_text().decode())
        self._file.flush()

    def _lock(self, file: IO[str]) -> bool | None:
        """Lock the file; return whether that was possible, None on a file system without locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _age(self, file: IO[str]) -> float:
        """Return the seconds since the file was renewed."""
        with tempfile.TemporaryFile(dir=self._path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime

    def _holder(self, file: IO[str]) -> dict[str, Any]:
        file.seek(0)
        try:
            held: dict[str, Any] = json.loads(file.read() or "{}")
        except ValueError:
            return {}
        return held


class ObjectLease:
    """The same for an object store, where nothing can be locked: an object names the holder and is renewed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="holdfast-object-lease", daemon=True)

    def __enter__(self) -> ObjectLease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it.
        """
        try:
            self._storage.put_new(LEASE, _holder_text())
        except FileExistsError:
            holder = json.loads(self._storage.read(LEASE) or b"{}")
            if time.time() - float(holder.get("time", 0)) < STALE_SECONDS and not _was_mine(holder):
                raise DirectoryTaken(_taken(self._storage.root, holder)) from None
            self._storage.remove(LEASE)
            self._storage.put_new(LEASE, _holder_text())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # a store that is gone must not hide why the run ends; the lease gets stale
            self._storage.remove(LEASE)

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with contextlib.suppress(Exception):  # stores raise errors of their own; the next time may do better
                self._storage.replace(LEASE, _holder_text())


def _holder_text() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}).encode()


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the holder is another process of this machine that goes on."""
    return holder.get("pid") != os.getpid() and Path(f"/proc/{holder.get('pid')}").exists()


def _was_mine(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    return holder.get("host") == socket.gethostname() and not Path(f"/proc/{holder.get('pid')}").exists()


def _taken(place: str, holder: dict[str, Any]) -> str:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
    return (
        f"{place} is in use by another job ({who}). Wait for it, stop it, or choose another run.name, and another "
        "checkpoint.storage if that is set."
    )
