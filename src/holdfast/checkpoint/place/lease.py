"""One job per place of checkpoints, and one save per checkpoint: two jobs in one place would mix their files.

A file can be written only if none is there, and that is all that is needed: leases are numbered, and the job that
writes the next number holds the place. A lease whose job is dead is taken over by the number after it, so of several
jobs that try at most one succeeds; a job that was thought dead finds a higher number and stops. The lease of a place
that was given back stays, empty, so that numbers never begin again while a job may be suspended.

A process of this machine is dead when it has ended (`files.died_here`). A process of another machine is dead when its
lease was not renewed for long, by the clock of the storage: those of two machines may differ, and either may jump.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast import patience
from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost, SaveFailed
from holdfast.checkpoint.place.layout import FOLDER, lease_name, lease_turns
from holdfast.checkpoint.place.storage import LocalStorage, Storage
from holdfast.errors import UserError
from holdfast.files import NotRegular, died_here, is_of_here, machine, parse_json, started

Told = Callable[[str], object]
"""Told in a line what a start waits for."""
_WIDTH = 512
"""Bytes of a lease: renewed in place, it keeps its name of the holder on a full disk."""
_HELD: set[str] = set()
"""Tokens of the leases that this process holds; one that it could not give back is nobody's."""
_EARLIER = ".lease.json"
"""Lease of a job of an earlier version in a directory, which that job renews as often."""


class Lease:
    """Held by rank 0 for the length of a block, and renewed by a thread.

    Args:
        storage: The place.
        of: Checkpoint in the place that is held; default: all of it. Leases of different things do not exclude each
            other.
        notify: Told that this waits for a job of another machine to be heard of; None: such a job is refused at once.
    """

    def __init__(self, storage: Storage, of: str = "", notify: Told | None = None) -> None:
        self._storage = storage
        self._of = of
        self._place = f"{place_words(storage)}/{of}".rstrip("/")
        self._notify = notify
        self._token = uuid.uuid4().hex
        self._turn = 0
        self._lost = False
        self._identity: object = None
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="holdfast-lease", daemon=True)

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            DirectoryTaken: Another job holds it, or was faster.
            UserError: What stands at its name is no file.
        """
        try:
            self._take()
        except NotRegular as error:
            raise UserError(f"{error}. Remove it, and start the same command again.") from error
        self._begin()
        return self

    def _take(self) -> None:
        before = self._turns()
        self._refuse_living(before, self._notify)
        self._refuse_earlier()
        self._turn = max(before, default=0) + 1
        try:
            self._put()
            # Others may have come and gone since the first look.
            others = [turn for turn in self._turns() if turn != self._turn]
            self._refuse_living(others)
            self._refuse_overwritten()
            for turn in others:
                self._storage.remove(self._name(turn))
        except BaseException:
            # Withdrawn, not given back: a job that was found alive goes on, and would take a higher number for its end.
            _HELD.discard(self._token)
            with contextlib.suppress(Exception):
                if self._is_mine():
                    self._storage.remove(self._name(self._turn))
            raise

    def _refuse_earlier(self) -> None:
        if self._of or not self._storage.exists(_EARLIER):
            return
        holder = parsed_holder(self._storage.read(_EARLIER))
        if holder and not died_here(holder) and self._storage.age(_EARLIER) < patience.current.lease_stale_seconds:
            raise DirectoryTaken(taken(self._place, holder))

    def _put(self) -> None:
        self._identity = self._storage.identity()
        try:
            self._storage.put_new(self._name(self._turn), self._text())
        except FileExistsError:
            raise DirectoryTaken(taken(self._place, self._holder(self._turn))) from None
        _HELD.add(self._token)
        if self._storage.identity() != self._identity:  # the directory was made for the file
            self._identity = self._storage.identity()
            self._storage.overwrite(self._name(self._turn), self._text())

    def _refuse_overwritten(self) -> None:
        """Refuse the place where the store let two jobs put one number: not every store looks and writes in one act."""
        holder = self._holder(self._turn)
        if holder.get("token") != self._token:
            raise DirectoryTaken(taken(self._place, holder))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._stop.set()
        self._thread.join()
        self._give_back()

    def _give_back(self) -> None:
        _HELD.discard(self._token)
        # A disk or store that is gone must not hide why the block ends, nor end one rank alone; the lease gets stale.
        with contextlib.suppress(Exception), self._writing:
            if not self._is_mine():
                return
            if self._of:
                self._storage.remove(self._name(self._turn))
            else:
                self._storage.replace(self._name(self._turn), b"")

    def _begin(self) -> None:
        self._thread.start()

    def _keep_renewing(self) -> None:
        while not self._stop.wait(patience.current.lease_renew_seconds):
            # File systems and stores raise errors of many kinds, and the next time may do better; a dead one is
            # noticed by the saves.
            with contextlib.suppress(Exception):
                self._renew()

    def _renew(self) -> None:
        with self._writing:
            if not self._lost and self._is_mine():  # else another job has taken over, and `check` says so
                self._storage.overwrite(self._name(self._turn), self._text())

    def check(self) -> None:
        """Refuse to go on where the place is another one by now, or another job's.

        Raises:
            SaveFailed: The directory was moved, deleted or replaced while it was held: a save would make a new one in
                its old place.
            PlaceLost: This job was not heard of for too long, and another one has taken over.
            OSError: The storage does not answer.
        """
        if self._storage.identity() != self._identity:
            raise SaveFailed(
                f"{self._place} was moved, deleted or replaced while its run goes on, so nothing more can be saved. "
                f"Put it back as {self._place} and start the same command again: it continues from the newest "
                "checkpoint in it."
            )
        with self._writing:
            if not self._storage.exists(self._name(self._turn)) and not self._lost:
                self._put_again()
            self._lost = self._lost or not self._is_mine()
        if self._lost or self._is_overtaken():
            self._lost = True
            holder: dict[str, Any] = {}
            with contextlib.suppress(OSError):
                holder = self._holder(max(self._turns(), default=self._turn))
            raise PlaceLost(lost(self._place, holder))

    def _put_again(self) -> None:
        """Write the lease anew: a user deleted the file, and no job has taken the place."""
        with contextlib.suppress(DirectoryTaken):
            if not self._turns():
                self._put()

    def _is_mine(self) -> bool:
        return self._holder(self._turn).get("token") == self._token

    def _is_overtaken(self) -> bool:
        """Return whether there is a higher number, and still is after a while: a job that finds this one withdraws."""
        if max(self._turns(), default=0) <= self._turn:
            return False
        time.sleep(patience.current.lease_withdraw_seconds)
        return max(self._turns(), default=0) > self._turn

    def _refuse_living(self, turns: Iterable[int], notify: Told | None = None) -> None:
        holder = self._living(turns)
        if notify is not None and holder and not is_of_here(holder):
            notify(waiting_words(self._place, holder))
            holder = self._after_silence(holder, turns)
        if holder:
            raise DirectoryTaken(taken(self._place, holder))

    def _after_silence(self, holder: dict[str, Any], turns: Iterable[int]) -> dict[str, Any]:
        """Return the holder of the place once it was heard of; empty if it is dead or gone.

        Args:
            holder: A process of another machine, of which nobody here can see whether it lives; a renewal changes it.
            turns: The leases that may be its own.
        """
        deadline = time.monotonic() + patience.current.lease_stale_seconds + patience.current.lease_renew_seconds
        current_holder = holder
        while current_holder == holder and time.monotonic() < deadline:
            time.sleep(patience.current.lease_look_seconds)
            current_holder = self._living(turns)
        return current_holder

    def _living(self, turns: Iterable[int]) -> dict[str, Any]:
        """Return the holder of one of these turns that may live; empty if none does."""
        for turn in turns:
            holder = self._holder(turn)
            lives = self._lives(holder) if holder else False
            if lives is None:
                lives = self._age(turn, holder) < patience.current.lease_stale_seconds
            if lives:
                return holder
        return {}

    def _lives(self, holder: dict[str, Any]) -> bool | None:
        """Return whether a holder goes on, though it may be stopped; None where nobody here can tell."""
        if not is_of_here(holder):
            return None
        if died_here(holder) or holder.get("place") not in {None, self._where()}:  # else this is a copy of its place
            return False
        if holder.get("pid") == os.getpid():
            return holder.get("token") in _HELD
        pid = holder.get("pid")
        known = isinstance(pid, int) and started(pid) is not None and started(pid) == holder.get("started")
        return True if known else None

    def _where(self) -> str | None:
        """Return what tells the place from a copy of it, on this machine; None where it has no such mark."""
        identity = self._storage.identity()
        return None if identity is None else str(identity)

    def _age(self, turn: int, holder: dict[str, Any]) -> float:
        try:
            return self._storage.age(self._name(turn))
        except FileNotFoundError:  # given back in the meantime
            return patience.current.lease_stale_seconds
        except NotImplementedError:  # a store that does not tell when an object was written
            written = holder.get("time")
            return time.time() - (written if isinstance(written, int | float) else 0)

    def _turns(self) -> list[int]:
        return lease_turns(self._storage.names()).get(self._of, [])

    def _name(self, turn: int) -> str:
        return lease_name(turn, self._of)

    def _text(self) -> bytes:
        holder = {
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "started": started(os.getpid()),
        }
        return json.dumps(holder | {"time": time.time(), "token": self._token}).encode().ljust(_WIDTH)

    def _holder(self, turn: int) -> dict[str, Any]:
        """Return the holder of a turn; empty if it was given back, or the lease is damaged."""
        try:
            return parsed_holder(self._storage.read(self._name(turn)))
        except FileNotFoundError:
            return {}


def parsed_holder(text: bytes) -> dict[str, Any]:
    """Return the holder that a lease names; empty if it names none, or is damaged."""
    try:
        values: Any = parse_json(text or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def place_words(storage: Storage) -> str:
    """Return what a user calls a place: the run's directory, or the place of checkpoints that has its own name."""
    root = Path(storage.root)
    return str(root.parent) if isinstance(storage, LocalStorage) and root.name == FOLDER else storage.root


def taken(place: str, holder: dict[str, Any]) -> str:
    """Return the words for a place, or a checkpoint, that another job holds."""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}"
    return (
        f"{place} is in use by another job ({who}). Wait for it, stop it, or choose another run.name, and another "
        "checkpoint.storage if that is set; in your own loop, another path."
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
