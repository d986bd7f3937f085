"""Linux system calls that end processes with all that they started; elsewhere they do less. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it dies."""
    # The kernel sends no signal for a parent that died before this call, so compare `os.getppid` after it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none escapes by starting a session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_with_group(pid: int) -> None:
    """Kill a process, and its group if it leads one."""
    # A worker killed before its setsid leads no group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def reap(pids: Iterable[int], seconds: float) -> dict[int, int]:
    """Return the wait status of those killed children that end within `seconds`.

    A process inside a system call that hangs, for example on a lost network file system, ends only when that returns.
    """
    waiting, ended, end, pause = set(pids), dict[int, int](), time.monotonic() + seconds, 0.001
    while True:
        for pid in waiting - ended.keys():
            try:
                gone, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # reaped before
                gone, status = pid, 0
            if gone:
                ended[pid] = status
        if waiting == ended.keys() or time.monotonic() > end:
            return ended
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def children() -> list[int]:
    """Return the child processes of this one, zombies included; an empty list without /proc."""
    this_pid = str(os.getpid())
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the name in parentheses, and a name may hold both blanks and parentheses.
            _, parent, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if parent == this_pid:
                pids.append(int(entry.parent.name))
    return pids


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
