"""What the kernel forbids a judged program: to look into other processes, and to end them. Standard library only.

A process of the same user can read the environment and the memory of every other one, keys of the shell that started
the run included, wherever its parents keep their own empty. A domain of Landlock (Linux 5.13), or else a user namespace
of its own, makes the kernel refuse that, for root too; a domain of Linux 6.12 refuses signals as well.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_VERSION = 1
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CAPABILITIES_VERSION = 0x20080522
_MAKE_BLOCK_DEVICE = 1 << 11
"""A ruleset must forbid something on disk; nobody but root can do this, and nobody needs to."""
_SCOPE_SIGNALS_ABI, _SCOPE_SOCKETS_AND_SIGNALS = 6, 0b11
_NEW_USER_NAMESPACE = 0x10000000


def hide() -> None:
    """Let no other process of this user read the memory or the environment of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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


def is_possible() -> bool:
    """Try it in a child, and say whether the kernel does it."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if confine() else 1)
    return os.waitpid(pid, 0)[1] == 0
