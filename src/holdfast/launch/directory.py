"""The launch directory: it holds the ranks' logs, steps and failure reports before a run directory exists.

It is a hidden directory next to the run directory, on the same file system, so that its logs can be renamed into the
run directory. Invariant: a configuration that is refused leaves nothing on the disk that was not there before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.files import append_text, read_end
from holdfast.parallel.failure.reports import Failure, read_note, report_file, reports_in, write_note


class LaunchDirectory:
    """Creates a launch directory, moves its logs to the run directory, and removes it; a context manager.

    Set `keep_logs` before leaving the block to keep the logs even if no run directory was created.
    """

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory.absolute()
        parent = self._run_directory.parent
        self._created = [path for path in (parent, *parent.parents) if not path.exists()]
        prefix = f".{self._run_directory.name}.launch-"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            raise ConfigError(f"run.dir={parent} cannot be written: {error}.\nName another directory.") from error
        # The kernel releases a flock when its holder dies, however it dies; a file with a process number would outlive
        # it.
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks: then nothing of ours is ever removed either
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        for path in parent.glob(f"{prefix}*"):
            if path != self.path:
                _remove_if_abandoned(path)
        self.keep_logs = False
        self._logs = self.path / "logs"
        if (self._run_directory / "run.json").exists() or (self._run_directory / "logs").is_dir():
            self._logs = self._run_directory / "logs"
        self._logs.mkdir(exist_ok=True)

    def __enter__(self) -> LaunchDirectory:
        return self

    def __exit__(self, *raised: object) -> None:
        self.settle()
        os.close(self._lock)
        if self._in_hiding and self.keep_logs:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self._created:
            with contextlib.suppress(OSError):  # not empty: somebody uses it
                parent.rmdir()

    @property
    def _in_hiding(self) -> bool:
        return self._logs.parent == self.path

    def settle(self) -> None:
        """Move the logs into the run directory as soon as rank 0 has made one; ranks keep writing to the same files."""
        if self._in_hiding and (self._run_directory / "run.json").exists():
            with contextlib.suppress(OSError):  # another launch of this name was first: ours stay where they are
                # Open descriptors follow a rename, so ranks need not reopen their logs.
                self._logs.rename(self._run_directory / "logs")
                self._logs = self._run_directory / "logs"

    def log(self, rank: int) -> Path:
        """Return the present path of a rank's log."""
        return self._logs / f"rank-{rank}.log"

    def begin_log(self, rank: int, ranks: int, attempt: int) -> int:
        """Append a header for this attempt to a rank's log; return the offset after it."""
        timestamp = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.log(rank).open("a") as log:
            log.write(f"--- rank {rank} of {ranks}, attempt {attempt}, {timestamp} ---\n")
            return log.tell()

    def begin_attempt(self) -> None:
        """Delete the notes and reports of an earlier attempt."""
        for pattern in ("failure-rank-*.json", "phase-rank-*", "beat-rank-*", "background-rank-*", "save-*", "step"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def step(self) -> int | None:
        """Return the step rank 0 was at, None before the first."""
        text = (read_note(self.path / "step") or "").strip()
        return int(text) if text.isdecimal() else None

    def phase(self, rank: int) -> str:
        """Return the phase a rank was in; empty if it recorded none."""
        return (read_note(self.path / f"phase-rank-{rank}") or "").strip()

    def reports(self) -> list[Failure]:
        """Return the reports of failures, earliest first; a torn one is passed over, and the exit code still speaks."""
        return reports_in(self.path)

    def report(self, report: Failure) -> None:
        """Write the report of a rank that died without one, so that the survivors can name it."""
        if not (target := report_file(self.path, report.rank)).exists():
            write_note(target, json.dumps(asdict(report)))

    def note_ending(self, event: str, step: int, reason: str) -> None:
        """Append to events.jsonl how the run ended, for ranks that could not; reports are deleted after this launch."""
        values = {"event": event, "step": step, "reason": reason, "time": time.time()}
        if (self._run_directory / "run.json").exists():
            with contextlib.suppress(OSError):  # a full disk: the launcher still says it on the terminal
                append_text(self._run_directory / "events.jsonl", json.dumps(values) + "\n")

    def has_stopped(self) -> bool:
        """Return whether the ranks recorded that they stopped, since they started for the last time."""
        for line in reversed(read_end(self._run_directory / "events.jsonl", 1 << 16).splitlines()):
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line).get("event")
                if event in {"start", "stop"}:
                    return bool(event == "stop")
        return False


def _remove_if_abandoned(path: Path) -> None:
    """Remove a launch directory whose launcher has ended, which shows in that its lock is free."""
    with contextlib.suppress(OSError):
        lock = os.open(path / "lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


@contextlib.contextmanager
def meeting_file() -> Iterator[Path]:
    """Yield the path of an empty file for the ranks of one attempt to meet; the file is removed after the block.

    Unlike a TCP port, other users cannot write to it. It is an anonymous file in memory, whose only path is this
    process's descriptor under /proc, which only processes of the same user can open. No file system has to support
    locks, and nothing remains however the launcher ends.
    """
    descriptor = os.memfd_create("holdfast-store")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
