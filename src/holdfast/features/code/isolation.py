"""Linux system calls that isolate judged code. Standard library only.

Without isolation, a process can read the environment and the memory of every process of the same user, including API
keys of the shell that started the run. A Landlock domain (Linux 5.13 and later), or else a new user namespace, makes
the kernel refuse that, even for root; with Linux 6.12 a domain also blocks signals. On other systems than Linux these
functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_VERSION = 1
_CAPABILITIES_VERSION = 0x20080522
_MAKE_BLOCK_DEVICE = 1 << 11
"""A ruleset must handle at least one file system right. Only root can make block devices, so forbidding that changes
nothing for judged code."""
_SCOPE_SIGNALS_ABI, _SCOPE_SOCKETS_AND_SIGNALS = 6, 0b11
_NEW_USER_NAMESPACE = 0x10000000


def hide() -> None:
    """Let no other process of this user read the memory or the environment of this one."""
    # /proc/PID/environ and /proc/PID/mem of a process that is not dumpable belong to root, and ptrace is refused.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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
