"""Failure reports of ranks, and short notes such as heartbeats, exchanged through the store or through files.

A report goes to the store, where the first writer wins, and, under our launcher, to one file per rank in the launch
directory. The files matter when rank 0 dies, since it hosts the store; the launcher writes the file of a rank that died
without a report. Notes go to the launch directory if there is one, else to the store, over a separate connection: a
call that blocks on the store's main connection would block every thread that uses it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from holdfast import patience

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # public as torch.distributed.Store, where type checkers do not see it

LONGEST_MESSAGE = 4000
"""Characters of a message that are passed on."""
LOST = "Lost"
"""Type of a report about a machine that says nothing any more."""
HANG = "Hang"
"""Type of a report about a rank that kept the others waiting."""
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""Errors of a file system that is full, read-only or failing, for which no code of ours is to blame."""
_KEY = "holdfast/failure"
_HEARD_KEY = "holdfast/failure/heard"
_READ_AT_MOST = 1 << 16


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
    of_disk: bool = False
    """Whether it is one of `DISK_ERRORS`, which would meet any rank in its place."""

    def sentence(self) -> str:
        """Return what a survivor tells its user."""
        who = f"Rank {self.rank}" if self.rank >= 0 else "Another rank"
        who += f" on {self.host}" if self.host else ""
        if self.type == LOST:
            return f"{self.message[:1].upper()}{self.message[1:]}."
        if self.kind == "silent":
            did = "hangs" if self.type == HANG else "died without a word"
            return f"{who} {did}{place(self.phase, self.step)}: {self.message}."
        return f"{who} failed{place(self.phase, self.step)}: {self.type}: {self.message}"


def place(phase: str, step: int | None) -> str:
    """Return a phase and a step as words with a leading space; empty if neither is known."""
    return (f" in phase {phase!r}" if phase else "") + (f" at step {step}" if step is not None else "")


def parse_failure(text: bytes | str) -> Failure | None:
    """Return the failure that a report's JSON encodes; None if the text is incomplete."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError):  # torn, or of another version: as good as none
        return None


def read_note(path: Path) -> str | None:
    """Return the text of a note; None if it cannot be read."""
    try:
        with path.open(errors="replace") as file:
            return file.read(_READ_AT_MOST)
    except OSError:
        return None


def write_note(path: Path, text: str) -> None:
    """Write a note whole or not at all; a full disk, which may be the very failure, drops it."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        staging.write_text(text)
        staging.replace(path)  # atomic, so that a reader never sees half a note


def report_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's report in a launch directory."""
    return directory / f"failure-rank-{rank}.json"


def reports_in(directory: Path) -> list[Failure]:
    """Return the reports in a launch directory, earliest first."""
    reports = [parse_failure(read_note(path) or "") for path in directory.glob("failure-rank-*.json")]
    return sorted(filter(None, reports), key=lambda report: report.time)


class NoteBoard:
    """Reads and writes notes in the launch directory if there is one, else in the store that all ranks share."""

    def __init__(self, store: Store, directory: Path | None) -> None:
        self._store = store
        self._directory = directory
        self._own: Store | None = None

    def write(self, name: str, text: str) -> None:
        """Write a note over an earlier one; a note that cannot be written is dropped."""
        if self._directory is not None:
            write_note(self._directory / name, text)
            return
        with contextlib.suppress(RuntimeError):
            self.connection().set(f"holdfast/board/{name}", text)

    def read(self, name: str) -> str | None:
        """Return a note; None if it does not exist, or if the store or directory no longer does."""
        return (self.read_all([name]) or [None])[0]

    def read_all(self, names: Sequence[str]) -> list[str | None] | None:
        """Return several notes at once; None if the store does not answer."""
        if self._directory is not None:
            return [read_note(self._directory / name) for name in names]
        keys = [f"holdfast/board/{name}" for name in names]
        try:
            connection = self.connection()
            if connection.has_extended_api() and connection.check(keys):  # type: ignore[attr-defined]  # not in the stubs
                return [value.decode() for value in connection.multi_get(keys)]
            return [connection.get(key).decode() if connection.check([key]) else None for key in keys]
        except RuntimeError:
            return None

    def connection(self) -> Store:
        """Return a connection to the store on which no other caller waits."""
        if self._own is None:
            self._own = cast("Store", self._store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        return self._own


class Reports:
    """One rank's view of all reports.

    Args:
        board: Board of the rank, whose connection `look` uses.
        store: Store that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        directory: The launch directory when all ranks run on this machine under our launcher, else None.
    """

    def __init__(self, board: NoteBoard, store: Store, rank: int, world_size: int, directory: Path | None) -> None:
        self._board, self._store = board, store
        self._rank, self._world_size = rank, world_size
        self._directory = directory
        self._store_lives = True
        self.heard: Failure | None = None
        """Failure of another rank, once `look` has read or a watch has seen one; the store may be gone later."""

    def write(self, failure: Failure) -> Failure:
        """Write a report to file and store; return the first report of the run, which may be another rank's."""
        self.write_file(failure)
        return self.write_store(failure)

    def write_file(self, failure: Failure) -> None:
        """Write a report to the launch directory only, where the launcher reads it too."""
        if self._directory is not None:
            write_note(report_file(self._directory, failure.rank), json.dumps(asdict(failure)))

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
        began, store_lives = time.monotonic(), True
        store_after = 0.0 if self._directory is None else patience.current.failure_store_seconds
        while True:
            failure = self.heard or self._first_in_files()
            waited = time.monotonic() - began
            if failure is None and store_lives and waited >= store_after:
                try:
                    failure = self._first_in_store(self._store)
                except RuntimeError:
                    store_lives = False
            if failure is not None or waited >= wait_seconds:
                return failure
            time.sleep(0.05)

    def look(self) -> None:
        """Look once whether another rank has failed; for the thread that beats."""
        if self.heard is None and self._directory is not None:
            self.heard = self._first_in_files()
        elif self.heard is None and self._store_lives:
            try:
                connection = self._board.connection()
                self.heard = self._first_in_store(connection)
                if self.heard is not None:
                    connection.add(_HEARD_KEY, 1)
            except RuntimeError:
                self._store_lives = False

    def _first_in_files(self) -> Failure | None:
        reports = reports_in(self._directory) if self._directory is not None else []
        return next((each for each in reports if each.kind != "peer" and each.rank != self._rank), None)

    def _first_in_store(self, store: Store) -> Failure | None:
        failure = parse_failure(store.get(_KEY)) if store.check([_KEY]) else None
        return failure if failure is not None and failure.rank != self._rank else None

    def linger(self) -> None:
        """Wait until all ranks have read the report.

        This process may host the store, and its closed sockets may be the first sign of the failure that others see.
        """
        if self._world_size == 1 or self._directory is not None:
            return
        deadline = time.monotonic() + patience.current.failure_linger_seconds  # a dead rank never hears
        with contextlib.suppress(RuntimeError):
            if self.heard is None:
                self._store.add(_HEARD_KEY, 1)
            while self._store.add(_HEARD_KEY, 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.05)
