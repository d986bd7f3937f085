"""Workers as the supervisor sees them: a fork, its channel, its task and its deadline."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from selectors import BaseSelector

from holdfast.rewards.processes import lifetime
from holdfast.rewards.processes.framing import MessageReader
from holdfast.rewards.scorers import ReadyReward
from holdfast.rewards.serving.serve import serve

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A scheduler sends them to every process of a job; the rank may still want its rewards before it saves and ends. The
supervisor ignores them, its workers do not."""
_MOST_OUTCOME_BYTES = 1 << 24


@dataclass(frozen=True)
class Task:
    """One reward for some samples of the request, by their places in it."""

    reward: int
    samples: tuple[int, ...]
    again: bool = False
    """Whether the worker that had it before was killed by a signal, which need not have been its samples' doing."""


@dataclass(eq=False)
class Worker:
    """A forked process, and what it is doing."""

    pid: int
    channel: socket.socket
    incoming: MessageReader = field(default_factory=lambda: MessageReader(_MOST_OUTCOME_BYTES))
    outgoing: bytes = b""
    task: Task | None = None
    waiting: list[int] = field(default_factory=list)
    """Samples of its task without an outcome, in order."""
    deadline: float = 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether it has a task and has been silent for too long."""
        return self.task is not None and time.monotonic() > self.deadline


def fork(
    scorers: Sequence[ReadyReward], inherited: Iterable[BaseSelector | socket.socket], pipes: Iterable[int]
) -> Worker:
    """Start a worker in a session of its own, so that it dies with everything it starts.

    `inherited` and `pipes` are open in the supervisor; the worker closes its copies.
    """
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for each in inherited:
            each.close()
        for pipe in pipes:
            os.close(pipe)
        _live(theirs.detach(), scorers, supervisor)
    theirs.close()
    ours.setblocking(False)
    return Worker(pid, ours)


def _live(channel: int, scorers: Sequence[ReadyReward], supervisor: int) -> None:
    status = 1
    try:
        os.setsid()
        lifetime.die_with_parent()
        if os.getppid() == supervisor:
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            serve(channel, scorers)
            status = 0
    except BaseException:  # noqa: BLE001 - the process edge: nothing may run on into the supervisor's code
        traceback.print_exc()
    finally:
        os._exit(status)


def was_killed(status: int | None) -> bool:
    """Say whether a signal ended a process."""
    return status is not None and os.WIFSIGNALED(status)


def how_worker_ended(status: int | None) -> str:
    """Return a wait status in words; None is that of a process that was killed and has not gone."""
    if status is None:
        return "it hangs in the kernel and cannot be killed"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}, perhaps for want of memory" if code == -signal.SIGKILL else f"signal {-code}"
