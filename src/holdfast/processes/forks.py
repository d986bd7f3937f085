"""One worker: a fork of the process that has imported the user's files, in a session of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from selectors import BaseSelector
from typing import Any

from holdfast.processes import framing, kernel
from holdfast.processes.framing import MessageReader
from holdfast.text.escaping import escaped_paragraph

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that the fork server ignores and its workers do not. A scheduler sends them to every process of a job, and
the rank may still need its workers before it saves and ends."""
MOST_ANSWER_BYTES = 1 << 24

Tell = Callable[[bytes], None]
"""Sends an answer, which is JSON."""


@dataclass(frozen=True)
class Work:
    """A kind of work, made in the fork server of what a rank asked for."""

    ready: Mapping[str, Any]
    """What the rank is told once the user's files are imported; plain JSON."""
    serve: Callable[[Iterator[bytes], Tell], None]
    """Runs in a worker: answers each request as often as was asked, until there are no more."""
    is_answer: Callable[[object], bool]
    """Whether a worker may say this; one that says anything else is killed."""
    memory_bytes: int | None = None
    """Most address space of a worker."""
    clear: Callable[[int], None] | None = None
    """Removes what a killed worker left; takes its process number."""
    kept: frozenset[int] = frozenset()
    """Children of the fork server that serve its workers and end with it."""


@dataclass(eq=False)
class Worker:
    """A forked process and its present request, as the fork server sees it."""

    pid: int
    key: int
    """By which the rank knows it."""
    channel: socket.socket
    incoming: MessageReader = field(default_factory=lambda: MessageReader(MOST_ANSWER_BYTES))
    outgoing: bytes = b""
    missing: int = 0
    """Answers to its request that have not come."""
    seconds: float = 0.0
    """Longest wait for the next of them."""
    number: int = 0
    """Of its request; every answer names it, so that none is taken for one of the next request."""
    asked_at: float = 0.0
    deadline: float | None = None
    """When an answer, or the end of a worker that leaves, is due."""
    is_leaving: bool = False

    @property
    def is_overdue(self) -> bool:
        """Whether it has been silent for too long."""
        return self.deadline is not None and time.monotonic() > self.deadline

    @property
    def is_asked(self) -> bool:
        """Whether the rank waits for an answer of it."""
        return self.missing > 0 and not self.is_leaving


def fork(key: int, work: Work, inherited: Iterable[BaseSelector | socket.socket], pipes: Iterable[int]) -> Worker:
    """Fork a worker that leads a new session, so that it can be killed together with everything it starts.

    Args:
        key: By which the rank knows it.
        work: What it does.
        inherited, pipes: What the fork server has open; the worker closes its copies.
    """
    ours, theirs = socket.socketpair()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _live(theirs, work, server, (ours, inherited, pipes))
    theirs.close()
    ours.setblocking(False)
    return Worker(pid, key, ours)


def print_into(log: str) -> None:
    """Redirect standard output and error of this process and its forks to a file; do nothing if it cannot be opened."""
    with contextlib.suppress(OSError):
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        os.close(printed)


def print_traceback(error: BaseException) -> None:
    """Print what the user's code raised."""
    # A full disk, what the user's code closed or replaced, or an exception that cannot even be formatted.
    with contextlib.suppress(Exception):
        lines = "".join(traceback.format_exception(error))
        print(escaped_paragraph(lines), end="", file=sys.stderr, flush=True)


def _live(
    theirs: socket.socket,
    work: Work,
    server: int,
    inherited: tuple[socket.socket, Iterable[BaseSelector | socket.socket], Iterable[int]],
) -> None:
    status = 1
    try:
        ours, channels, pipes = inherited
        channel = theirs.detach()
        # Held open in the child, a sibling's channel would never end for that sibling.
        for opened in (ours, *channels):
            opened.close()
        for pipe in pipes:
            os.close(pipe)
        os.setsid()
        kernel.die_with_parent()
        if os.getppid() == server:
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            if work.memory_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (work.memory_bytes, work.memory_bytes))
            asked = _Channel(channel)
            work.serve(asked.requests(), asked.tell)
            status = 0
    except BaseException:  # noqa: BLE001 - the process edge: nothing may run on into the server's code
        traceback.print_exc()
    finally:
        # Not sys.exit: that would run the server's exit handlers and flush its buffers a second time, in the fork.
        os._exit(status)


class _Channel:
    """A worker's end of the channel to its server."""

    def __init__(self, channel: int) -> None:
        self._channel, self._pid = channel, os.getpid()
        self._number = 0

    def requests(self) -> Iterator[bytes]:
        """Yield requests until the server closes the channel; print into the log that each names."""
        log = None
        while (payload := framing.read_frame(self._channel)) is not None:
            self._number, new_log, request = pickle.loads(payload)  # noqa: S301 - from our own parent
            if new_log != log:
                log = new_log
                print_into(log)
            yield request

    def tell(self, answer: bytes) -> None:
        """Send an answer to the present request."""
        if os.getpid() != self._pid:
            os._exit(1)  # the user's code forked, and its child came back to us
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user's code
            sys.stdout.flush()
        framing.write(self._channel, b"%d %b" % (self._number, answer))


def describe_end(status: int | None) -> str:
    """Describe a wait status; None means that the process was killed and has not ended."""
    if status is None:
        return "it hangs in the kernel and cannot be killed"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}, perhaps for want of memory" if code == -signal.SIGKILL else f"signal {-code}"
