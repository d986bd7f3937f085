"""Messages over pipes and sockets: eight bytes of length, little-endian, then the payload."""

from __future__ import annotations

import math
import os
import select
import struct
import time
from collections.abc import Iterator

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 16
_SLICES = 20


class BrokenChannel(Exception):  # noqa: N818 - the name says what happened
    """The received bytes are not a message of ours: other code has written to the channel."""


def frame(payload: bytes) -> bytes:
    """Return a message with its length prefix."""
    return _LENGTH.pack(len(payload)) + payload


def write(descriptor: int, payload: bytes, timeout_seconds: float | None = None) -> None:
    """Write a whole message to a blocking descriptor.

    Raises:
        TimeoutError: The reader accepted nothing for `timeout_seconds`.
    """
    remaining = memoryview(frame(payload))
    while remaining:
        piece = remaining
        if timeout_seconds is not None:
            if not _becomes(select.POLLOUT, descriptor, timeout_seconds):
                raise TimeoutError
            piece = remaining[: select.PIPE_BUF]  # what a pipe that is ready takes without blocking
        remaining = remaining[os.write(descriptor, piece) :]


def has_come(descriptor: int, timeout_seconds: float) -> bool:
    """Wait for bytes, or the end; return whether they came in time."""
    return _becomes(select.POLLIN, descriptor, timeout_seconds)


def _becomes(event: int, descriptor: int, timeout_seconds: float) -> bool:
    """Wait for an event in many short slices.

    If this process and its peer are suspended together and continue later, a single long wait would count that time;
    here at most one slice is lost.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return any(poll.poll(math.ceil(1000 * timeout_seconds / _SLICES)) for _ in range(_SLICES))


def read_frame(descriptor: int, deadline: float | None = None, most_bytes: int | None = None) -> bytes | None:
    """Return the next message; None at the end.

    Raises:
        BrokenChannel: The message is longer than `most_bytes`.
        TimeoutError: The message is incomplete at `deadline`, which is in seconds of time.monotonic.
    """
    head = _read_exactly(descriptor, _LENGTH.size, deadline)
    if head is None:
        return None
    size = _LENGTH.unpack(head)[0]
    if most_bytes is not None and size > most_bytes:
        raise BrokenChannel(f"a message of {size} bytes")
    return _read_exactly(descriptor, size, deadline)


def _read_exactly(descriptor: int, size: int, deadline: float | None) -> bytes | None:
    pieces: list[bytes] = []
    while size > 0:
        if deadline is not None and not is_readable(descriptor, max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        piece = os.read(descriptor, min(size, _CHUNK_BYTES))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait for bytes, or the end, in one go; return whether they came in time."""
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * seconds)))


class MessageReader:
    """Splits the bytes of a non-blocking descriptor into messages."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the messages that are whole now.

        Raises:
            BrokenChannel: A length exceeds `most_bytes`.
        """
        self._bytes += received
        while len(self._bytes) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._bytes)[0]
            if self._most is not None and size > self._most:
                raise BrokenChannel(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield message
