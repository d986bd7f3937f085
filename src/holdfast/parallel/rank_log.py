"""Where a rank that torchrun, Slurm or Ray has started leaves what it prints: logs/rank-N.log of its run.

Under our own launcher the launcher writes these files. Elsewhere every rank prints into the same screen or job file, so
from the start of a run on only the first does; what the others print goes to their logs alone.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO


class RankLog:
    """One rank's log, once there is a run directory.

    Args:
        rank, ranks: Which of how many.
        host: This machine.
    """

    def __init__(self, rank: int, ranks: int, host: str) -> None:
        self._rank, self._ranks, self._host = rank, ranks, host
        self._screen: int | None = None

    def begin(self, folder: Path) -> None:
        """Write into the folder of logs from now on; a disk that does not take it leaves everything on the screen.

        Args:
            folder: Of the run. One that other machines do not see holds the logs of this one.
        """
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            log = os.open(folder / f"rank-{self._rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            timestamp = datetime.now().astimezone().isoformat(timespec="seconds")
            os.write(log, f"--- rank {self._rank} of {self._ranks} on {self._host}, {timestamp} ---\n".encode())
            if self._rank == 0:
                sys.stderr = _TeeStream(sys.stderr, log)
                return
            self._screen = os.dup(2)
            for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
                stream.flush()
                os.dup2(log, descriptor)
            os.close(log)

    def show(self, text: str) -> None:
        """Print a line where the first rank prints, for a rank that speaks in its place."""
        with suppress(OSError):
            os.write(2 if self._screen is None else self._screen, f"{text}\n".encode())


class _TeeStream:
    """A stream that also writes into a log."""

    def __init__(self, stream: TextIO, log: int) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(self._log, text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
