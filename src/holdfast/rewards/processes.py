"""What the kernel does for processes that must not outlive their purpose. On Linux; elsewhere less is caught."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it dies."""
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


def children() -> list[int]:
    """Return the processes whose parent is this one, those that wait to be reaped included; none off Linux."""
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the name in parentheses, and a name may hold both blanks and parentheses.
            _, parent, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if parent == own:
                found.append(int(entry.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
