"""One job per place of checkpoints: two jobs in one directory would both report success and mix their shards."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast import patience
from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost, SaveFailed
from holdfast.checkpoint.place.layout import FOLDER, LEASE
from holdfast.checkpoint.place.renewal import RenewedLease, Told, after_silence
from holdfast.checkpoint.place.storage import LocalStorage, make_durably
from holdfast.errors import UserError
from holdfast.files import NotRegular, RegularFile, died_here, is_of_here, machine, parse_json, read_bytes

_WIDTH = 512


class Lease(RenewedLease):
    """Held by rank 0 for the length of a block.

    A lock on the file holds within a machine and dies with the process. Network file systems may not pass it on to
    other machines, so the file also names its holder and the machine (`files.machine`; host names may be shared), and
    is renewed while the run goes on. Its age is told by the file system's own clock: those of two machines may differ,
    and either may jump.

    Args:
        directory: Of the checkpoints.
        notify: Told that this waits for a job of another host to be heard of; None: such a job is refused at once.
    """

    def __init__(self, directory: Path, notify: Told | None = None) -> None:
        super().__init__("holdfast-lease")
        self._path = directory / LEASE
        self._storage = LocalStorage(directory)
        # What users call it: the run's directory, or the place of checkpoints that has a name of its own.
        self._place = str(directory.parent if directory.name == FOLDER else directory)
        self._notify = notify
        self._token = uuid.uuid4().hex
        self._writing = threading.Lock()
        self._file: RegularFile | None = None
        self._directory: tuple[int, int] | None = None

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it.
        """
        make_durably(self._path.parent)
        try:
            with suppress(FileExistsError), RegularFile(self._path, "xb"):
                pass
            file = RegularFile(self._path, "rb+")
        except NotRegular as error:
            raise UserError(f"{error}. Remove it, and start the same command again.") from error
        try:
            self._refuse_living(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        self._directory = _inode(self._path.parent)
        self._write()
        self._begin()
        return self

    def _refuse_living(self, file: RegularFile) -> None:
        holder = self._living(file)
        if self._notify is not None and "host" in holder and not is_of_here(holder):
            self._notify(waiting_words(self._place, holder))
            holder = after_silence(holder, lambda: self._living(file))
        if holder:
            raise DirectoryTaken(taken(self._place, holder))

    def _living(self, file: RegularFile) -> dict[str, Any]:
        """Return who holds the place; empty if nobody does."""
        locked = self._lock(file)
        holder = self._holder()
        # A lock that was given says nothing of other machines, and there may be none; then the age decides.
        unlocked = "host" in holder and (not is_of_here(holder) or (locked is None and _lives(holder)))
        if locked is False or (unlocked and self._storage.age(LEASE) < patience.current.lease_stale_seconds):
            return holder or {"pid": "?"}
        return {}

    def _give_back(self) -> None:
        if self._file is not None:
            with self._writing:
                if parsed_holder(os.pread(self._file.fileno(), _WIDTH, 0)).get("token") == self._token:
                    self._file.truncate(0)
                self._file.close()
                self._file = None

    def check(self) -> None:
        """Refuse to go on where the directory is another one by now, or another job's.

        Raises:
            SaveFailed: It was moved, deleted or replaced while it was held: a save would make a new one in its old
                place.
            PlaceLost: This job was not heard of for too long, and another one has taken over.
        """
        assert self._file is not None
        if _inode(self._path.parent) != self._directory:
            directory = self._place
            raise SaveFailed(
                f"{directory} was moved, deleted or replaced while its run goes on, so nothing more can be saved. Put "
                f"it back as {directory} and start the same command again: it continues from the newest checkpoint in "
                "it."
            )
        with self._writing:
            if not self._path.exists():
                self._take_again()
            holder = self._holder()
        if holder.get("token") != self._token:
            raise PlaceLost(lost(self._place, holder))

    def _take_again(self) -> None:
        """Write the lease anew: somebody deleted the file, and the place is what it was."""
        assert self._file is not None
        with suppress(FileExistsError):  # another job was faster
            new = RegularFile(self._path, "xb+")
            self._lock(new)
            self._file.close()
            self._file = new
            self._write()

    def _renew(self) -> None:
        with self._writing:
            if self._holder().get("token") == self._token:  # else another job has taken over, and `check` says so
                self._write()

    def _write(self) -> None:
        assert self._file is not None
        # In place and of one width: a file that is emptied first stays empty on a full disk, and names nobody.
        os.pwrite(self._file.fileno(), holder_text(token=self._token).ljust(_WIDTH), 0)

    def _lock(self, file: RegularFile) -> bool | None:
        """Lock the file; return whether that was possible, None on a file system without locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _holder(self) -> dict[str, Any]:
        """Return what the file says; opened anew, since a network file system asks its server then."""
        return parsed_holder(read_bytes(self._path))


def parsed_holder(text: bytes) -> dict[str, Any]:
    """Return who holds a lease, by what is written down; empty if that is damaged."""
    try:
        values: Any = parse_json(text or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _inode(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory from another one of its name; None if it is gone."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def holder_text(**more: Any) -> bytes:
    """Return who holds a lease, as it is written down."""
    holder = {"host": socket.gethostname(), "machine": machine(), "pid": os.getpid(), "time": time.time()}
    return json.dumps(holder | more).encode()


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the holder is another process of this machine that goes on."""
    return holder.get("pid") != os.getpid() and not died_here(holder)


def taken(directory: str, holder: dict[str, Any]) -> str:
    """Return the words for a place that another job holds."""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
    return (
        f"{directory} is in use by another job ({who}). Wait for it, stop it, or choose another run.name, and another "
        "checkpoint.storage if that is set."
    )


def lost(directory: str, holder: dict[str, Any]) -> str:
    """Return the words for a place that another job has taken over from this one."""
    return (
        f"{taken(directory, holder)} It took the place over while this job could not renew its lease for "
        f"{patience.current.lease_stale_seconds:.0f} s. What this job has saved is there; nothing more was written."
    )


def waiting_words(directory: str, holder: dict[str, Any]) -> str:
    """Return the words for a place whose holder may have died on another machine."""
    return (
        f"{directory} was held by process {holder.get('pid', '?')} on {holder.get('host', 'another host')}: waiting "
        f"up to {patience.current.lease_stale_seconds:.0f} s for a sign that it lives"
    )
