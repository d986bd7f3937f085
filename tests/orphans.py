"""End with the tests what they started, however they end: a cancelled job must leave no run that trains on.

Every process inherits a variable of its tests. This file, run as a program, waits until their process is gone and kills
whatever still has it: runs, their ranks and workers, programs in sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "HOLDFAST_TESTS"
_SECONDS = 60
"""Longest wait for a process that hangs in a system call."""


def end_with_this_process() -> None:
    """Start the program for this process and all that it starts from now on."""
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    os.environ[VARIABLE] = f"{os.getpid()}.{time.time_ns()}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[VARIABLE]]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    os.posix_spawn(sys.executable, command, environ, file_actions=nowhere, setsid=True)


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _main() -> None:
    pid, mark = int(sys.argv[1]), f"{VARIABLE}={sys.argv[2]}".encode()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])
    deadline = time.monotonic() + _SECONDS
    while (pids := list(_marked(mark))) and time.monotonic() < deadline:
        for each in pids:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    _main()
