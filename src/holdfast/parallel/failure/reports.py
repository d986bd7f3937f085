"""Failure reports of ranks, and short notes such as heartbeats, exchanged through the store or through files.

A report goes to the store, where the first writer wins, and, under our launcher, to one file per rank in the launch
directory. The files matter when rank 0 dies, since it hosts the store; the launcher writes the file of a rank that died
without a report. Notes go to the launch directory if there is one, else to the store, over a separate connection: a
call that blocks on the store's main connection would block every thread that uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from holdfast import patience

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it


class NoteBoard:
    """Reads and writes notes in the store that all ranks share.

    Args:
        store: Store that all ranks share.
        directory: The launch directory if there is one.
    """

    def __init__(self, store: Store, directory: Path | None) -> None:
        self._store = store
        self._directory = directory
        self._own: Store | None = None

    def write(self, name: str, text: str) -> None:
        """Write a note over an earlier one; a note that cannot be written is dropped."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._directory is not None:
                staging = self._directory / f".{name}.{os.getpid()}"
                staging.write_text(text)
                # Renaming is atomic, so a reader never sees half a note.
                staging.replace(self._directory / name)
            else:
                self._connection().set(f"holdfast/board/{name}", text)

    def read(self, name: str) -> str | None:
        """Return a note; None if it does not exist, or if the store or directory no longer does."""
        with contextlib.suppress(OSError, RuntimeError):
            if self._directory is not None:
                return (self._directory / name).read_text()
            key = f"holdfast/board/{name}"
            connection = self._connection()
            return connection.get(key).decode() if connection.check([key]) else None
        return None

    def read_all(self, names: Sequence[str]) -> list[str | None] | None:
        """Return several notes of a store at once; None if the store does not answer."""
        keys = [f"holdfast/board/{name}" for name in names]
        try:
            connection = self._connection()
            if connection.check(keys):
                return [value.decode() for value in connection.multi_get(keys)]
            return [connection.get(key).decode() if connection.check([key]) else None for key in keys]
        except (OSError, RuntimeError):
            return None

    def _connection(self) -> Store:
        if self._own is None:
            self._own = cast("Store", self._store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        return self._own


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it

LONGEST_MESSAGE = 4000
"""Characters of a message that are passed on."""

LOST = "Lost"
"""Type of a report about a machine that says nothing any more."""
_KEY = "holdfast/failure"
_HEARD_KEY = "holdfast/failure/heard"


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: its own report, or another process's report about a rank that died without one."""

    rank: int
    """-1 if a peer died without a report and it is not known which."""
    kind: Literal["error", "user", "peer", "silent"]
    """error: an exception of the rank itself. user: a `UserError`. peer: the rank lost another rank. silent: the rank
    died or hangs, and another process reports it."""
    phase: str
    type: str
    message: str
    step: int | None
    time: float
    """Seconds since the epoch."""
    host: str = ""
    """Its machine; empty where all ranks share one."""

    def sentence(self) -> str:
        """Return what a survivor tells its user."""
        location = f" in phase {self.phase!r}" if self.phase else ""
        location += f" at step {self.step}" if self.step is not None else ""
        who = f"Rank {self.rank}" if self.rank >= 0 else "Another rank"
        who += f" on {self.host}" if self.host else ""
        if self.type == LOST:
            return f"{self.message[:1].upper()}{self.message[1:]}."
        if self.kind == "silent":
            did = "hangs" if self.type == "Hang" else "died without a word"
            return f"{who} {did}{location}: {self.message}."
        return f"{who} failed{location}: {self.type}: {self.message}"


class Reports:
    """One rank's view of all reports.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        directory: The launch directory when all ranks run on this machine under our launcher, else None.
    """

    def __init__(self, store: Store, rank: int, world_size: int, directory: Path | None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._directory = directory
        self._heard: Failure | None = None
        """Failure that the watching thread has read; kept, since the store may be gone when the main thread asks."""

    def hear(self, failure: Failure) -> None:
        """Record a failure that this process detected itself, as if another rank had reported it."""
        self._heard = self._heard or failure

    def write(self, failure: Failure) -> Failure:
        """Write a report to file and store; return the first report of the run, which may be another rank's."""
        self.write_file(failure)
        return self.write_store(failure)

    def write_file(self, failure: Failure) -> None:
        """Write a report to the launch directory only, where the launcher reads it too."""
        if self._directory is None:
            return
        target = self._directory / f"failure-rank-{failure.rank}.json"
        staging = target.with_suffix(f".staging-{self._rank}")
        with contextlib.suppress(OSError):  # a full disk may be the very failure: the store carries the report too
            staging.write_text(json.dumps(asdict(failure)))
            staging.replace(target)

    def write_store(self, failure: Failure) -> Failure:
        """Write a report to the store only; return the report that was written first."""
        try:
            first = self._store.compare_set(_KEY, "", json.dumps(asdict(failure)))
        except RuntimeError:  # its host died: the files remain
            return failure
        return parse_failure(first) or failure

    def first(self, wait_seconds: float) -> Failure | None:
        """Return the first failure that another rank reported, waiting up to `wait_seconds` for one.

        Where there is a launch directory, its files are read first and the store only after a while: once the store's
        host has died, every call to it prints a page of C++ stack frames.
        """
        began = time.monotonic()
        store_lives = True
        while True:
            failure = self._heard or self._first_in_files()
            waited = time.monotonic() - began
            if failure is None and store_lives and waited >= self._store_after_seconds:
                failure, store_lives = self._first_in_store(self._store)
            if failure is not None or waited >= wait_seconds:
                return failure
            time.sleep(0.05)

    @property
    def _store_after_seconds(self) -> float:
        return 0.0 if self._directory is None else patience.current.failure_store_seconds

    def watch(self, stop: threading.Event) -> Failure | None:
        """Look until another rank has failed, and return how; None once `stop` is set. For a thread of its own."""
        # A connection of its own: a call that waits on the store's own connection would make this thread wait too.
        store: Store | None = None
        if self._directory is None:
            with contextlib.suppress(RuntimeError):
                store = cast("Store", self._store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        while not stop.wait(patience.current.failure_look_seconds):
            failure = self._first_in_files()
            if failure is None and store is not None:
                failure, lives = self._first_in_store(store)
                store = store if lives else None
            if failure is None:
                continue
            self._heard = failure
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    store.add(_HEARD_KEY, 1)
            return failure
        return None

    def _first_in_files(self) -> Failure | None:
        if self._directory is None:
            return None
        failures = [parse_failure(_read(path)) for path in self._directory.glob("failure-rank-*.json")]
        peer_failures = [
            failure
            for failure in failures
            if failure is not None and failure.kind != "peer" and failure.rank != self._rank
        ]
        return min(peer_failures, key=lambda failure: failure.time, default=None)

    def _first_in_store(self, store: Store) -> tuple[Failure | None, bool]:
        try:
            failure = parse_failure(store.get(_KEY)) if store.check([_KEY]) else None
        except RuntimeError:
            return None, False
        return (failure if failure is not None and failure.rank != self._rank else None), True

    def linger(self) -> None:
        """Wait until all ranks have read the report.

        This process may host the store, and its closed sockets may be the first sign of the failure that others see.
        """
        if self._world_size == 1 or self._directory is not None:
            return
        deadline = time.monotonic() + patience.current.failure_linger_seconds  # a dead rank never hears
        with contextlib.suppress(RuntimeError):
            if self._heard is None:
                self._store.add(_HEARD_KEY, 1)
            while self._store.add(_HEARD_KEY, 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.05)


def parse_failure(text: bytes | str) -> Failure | None:
    """Return the failure that a report's JSON encodes; None if the text is incomplete."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):  # torn, or of another version: as good as none
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
