"""Redirect the output of ranks that torchrun, Slurm or Ray has started to logs/rank-N.log of their run.

Under our own launcher, the launcher writes these files. Elsewhere all ranks print to one terminal or job file. From the
start of a run on, only rank 0 prints there; the output of the other ranks goes to their logs.
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
        """Redirect output to the log from now on; if the file cannot be written, everything stays on the terminal.

        Args:
            folder: The run's folder of logs. If machines do not share it, each holds the logs of its own ranks.
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
                # The descriptors and not `sys.stdout`: NCCL, gloo and child processes write to 1 and
                # 2 directly.
                os.dup2(log, descriptor)
            os.close(log)

    def show(self, text: str) -> None:
        """Print a line to the terminal or job file, for a rank that reports in place of a dead rank 0."""
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
