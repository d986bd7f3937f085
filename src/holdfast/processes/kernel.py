"""Linux system calls that end orphaned processes and isolate judged code. Standard library only.

Without isolation, a process can read the environment and the memory of every process of the same user, including API
keys of the shell that started the run. A Landlock domain (Linux 5.13 and later), or else a new user namespace, makes
the kernel refuse that, even for root; with Linux 6.12 a domain also blocks signals. On other systems than Linux these
functions do nothing or less.
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
"""A ruleset must handle at least one file system right. Only root can make block devices, so forbidding that changes
nothing for judged code."""
_SCOPE_SIGNALS_ABI, _SCOPE_SOCKETS_AND_SIGNALS = 6, 0b11
_NEW_USER_NAMESPACE = 0x10000000


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


def hide() -> None:
    """Let no other process of this user read the memory or the environment of this one."""
    # /proc/PID/environ and /proc/PID/mem of a process that is not dumpable belong to root, and ptrace is refused.
    _prctl(_PR_SET_DUMPABLE, 0)


def confine() -> bool:
    """Isolate this process and its future children from other processes; return whether the kernel supports it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    # The default result type is int, which would cut the return value of a 64-bit system call.
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
    # The kernel refuses this call unless PR_SET_NO_NEW_PRIVS is set, which `confine` does before.
    entered = bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    os.close(ruleset)
    return entered


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
