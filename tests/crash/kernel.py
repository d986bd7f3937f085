"""System calls that the kernel itself refuses, to the end of a process of its own (seccomp)."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

import pytest

_NUMBERS = {
    "renameat2": {"x86_64": 316, "aarch64": 276},
    "fsync": {"x86_64": 74, "aarch64": 82},
    "seccomp": {"x86_64": 317, "aarch64": 277},
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_CALL, _FLAGS = 0, 16 + 8 * 4
"""Where in what a filter sees (struct seccomp_data) the call's number is, and its fifth argument."""

KNOWN_MACHINE = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "aarch64"}, reason="knows the numbers of calls on two kinds of machines"
)


def _number(call: str) -> int:
    return _NUMBERS[call][platform.machine()]


def _refuse(conditions: list[tuple[int, int]], error: int) -> None:
    """Let all threads of this process get an error from calls that meet every condition, a place and its value."""
    steps = []
    for place, (offset, value) in enumerate(conditions):
        rest = 2 * (len(conditions) - place - 1)
        steps += [(_LOAD, 0, 0, offset), (_EQUAL, 0, rest + 1, value)]
    steps += [(_RETURN, 0, 0, 0x00050000 | error), (_RETURN, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.syscall(_number("seccomp"), 1, 1, program) == 0  # SECCOMP_SET_MODE_FILTER, for every thread


def refuse_to_exchange() -> None:
    """Refuse to exchange two names, as a file system that cannot does; other renames work."""
    ranks = 2
    _refuse([(_CALL, _number("renameat2")), (_FLAGS, ranks)], errno.EINVAL)


def refuse_to_sync() -> None:
    """Answer every fsync as a disk does that could not take the bytes."""
    _refuse([(_CALL, _number("fsync"))], errno.EIO)
