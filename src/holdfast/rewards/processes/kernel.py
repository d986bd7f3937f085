"""What the kernel does for processes of rewards: ends those whose purpose is over, and keeps judged code from others.

Standard library only; elsewhere than on Linux less is caught. A process of the same user can read the environment and
the memory of every other one, keys of the shell that started the run included, wherever its parents keep their own
empty. A domain of Landlock (Linux 5.13), or else a user namespace of its own, makes the kernel refuse that, for root
too; a domain of Linux 6.12 refuses signals as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_VERSION = 1
_CAPABILITIES_VERSION = 0x20080522
_MAKE_BLOCK_DEVICE = 1 << 11
"""A ruleset must forbid something on disk; nobody but root can do this, and nobody needs to."""
_SCOPE_SIGNALS_ABI, _SCOPE_SOCKETS_AND_SIGNALS = 6, 0b11
_NEW_USER_NAMESPACE = 0x10000000


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


def reap(pids: Iterable[int], seconds: float) -> dict[int, int]:
    """Return the wait status of killed children, of those that end in time.

    One inside a system call that hangs, on a file system that is gone for example, ends only when that returns.
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
    """Return the processes whose parent is this one, those that wait to be reaped included; none off Linux."""
    this_pid = str(os.getpid())
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the name in parentheses, and a name may hold both blanks and parentheses.
            _, parent, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if parent == this_pid:
                pids.append(int(entry.parent.name))
    return pids


def hide() -> None:
    """Let no other process of this user read the memory or the environment of this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def confine() -> bool:
    """Cut this process and what it starts off from the processes around it; return whether the kernel does it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # what it starts gains none of the rights back
    # Root's right to watch the machine's performance reads every environment, past a domain too.
    libc.capset(struct.pack("<II", _CAPABILITIES_VERSION, 0), bytes(24))
    return _enter_domain(libc) or bool(libc.unshare(_NEW_USER_NAMESPACE) == 0)


def _enter_domain(libc: ctypes.CDLL) -> bool:
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return False
    scoped = _SCOPE_SOCKETS_AND_SIGNALS if version >= _SCOPE_SIGNALS_ABI else 0
    # handled_access_fs, handled_access_net, scoped; an older kernel takes zeros beyond what it knows.
    attributes = struct.pack("<QQQ", _MAKE_BLOCK_DEVICE, 0, scoped)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    entered = bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    os.close(ruleset)
    return entered


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
