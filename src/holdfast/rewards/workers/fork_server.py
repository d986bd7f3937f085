"""Reward workers: fork one, and what it runs.

A worker calls one reward for the samples of a task, and sends each outcome to the supervisor as soon as it has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from selectors import BaseSelector
from typing import Any

from holdfast.rewards.base import (
    MissingArgument,
    Sample,
    SampleOutcome,
    describe_error,
    outcome_of,
    outcome_of_exception,
    outcomes_of,
)
from holdfast.rewards.functions.signatures import (
    BatchedCall,
    ConcurrentCall,
    Many,
    One,
    PerSampleCall,
    event_loop,
)
from holdfast.rewards.processes import framing, kernel
from holdfast.rewards.processes.framing import MessageReader
from holdfast.rewards.scorers import ReadyReward
from holdfast.text.escaping import escaped_paragraph


def serve(channel: int, scorers: Sequence[ReadyReward]) -> None:
    """Answer tasks until the supervisor closes the channel.

    A task is a pickled triple: the index of the reward, a list of pickled samples, and the log's path, or None while it
    is still the path from the start.
    """
    worker_pid, log = os.getpid(), None
    while (payload := framing.read_frame(channel)) is not None:
        reward, packed, new_log = pickle.loads(payload)  # noqa: S301 - from our own parent
        if new_log != log:
            log = new_log
            print_into(log)
        _TaskRun(channel, scorers[reward], worker_pid).run(packed)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user's code
            sys.stdout.flush()
        framing.write(channel, json.dumps({"done": True}).encode())


def print_into(log: str) -> None:
    """Redirect standard output and error of this process and its forks to a file; do nothing if it cannot be opened."""
    with contextlib.suppress(OSError):
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        os.close(printed)


@dataclass(frozen=True)
class _TaskRun:
    channel: int
    scorer: ReadyReward
    worker_pid: int

    def run(self, packed: Sequence[bytes]) -> None:
        samples: dict[int, Sample] = {}
        for index, packed_sample in enumerate(packed):
            try:
                samples[index] = pickle.loads(packed_sample)  # noqa: S301 - from our own parent
            except Exception as error:  # noqa: BLE001 - whatever a column's class does when it is rebuilt
                self._send(index, SampleOutcome(fault="error", message=f"cannot see the row: {describe_error(error)}"))
        match self.scorer.bound:
            case PerSampleCall(call):
                for index, sample in samples.items():
                    self._one(call, index, sample)
            case BatchedCall(call):
                self._batch(call, samples)
            case ConcurrentCall(call):
                self._concurrent(call, samples)

    def _one(self, call: One, index: int, sample: Sample) -> None:
        _seed(self.scorer.name, sample)
        try:
            outcome = outcome_of(call(sample))
        except BaseException as error:  # noqa: BLE001 - the process edge: SystemExit is a fault of the sample, too
            outcome = self._failed(error)
        self._send(index, outcome)

    def _batch(self, call: Many, samples: dict[int, Sample]) -> None:
        if not samples:
            return
        _seed(self.scorer.name, next(iter(samples.values())))
        try:
            outcomes = outcomes_of(call(list(samples.values())), len(samples))
        except BaseException as error:  # noqa: BLE001 - as above
            outcomes = [self._failed(error)]
            if len(samples) > 1:
                # One bad sample fails the call for all of them; alone, each fails or stands for itself.
                self._tell({"split": True})
                return
        for index, outcome in zip(samples, outcomes, strict=True):
            self._send(index, outcome)

    def _concurrent(self, call: One, samples: dict[int, Sample]) -> None:
        import asyncio

        async def one(index: int, sample: Sample) -> None:
            try:
                outcome = outcome_of(await call(sample))
            except BaseException as error:  # noqa: BLE001 - as above
                outcome = self._failed(error)
            self._send(index, outcome)

        async def together() -> None:
            await asyncio.gather(*(one(index, sample) for index, sample in samples.items()))

        event_loop().run_until_complete(together())

    def _failed(self, error: BaseException) -> SampleOutcome:
        if not isinstance(error, MissingArgument):
            # A full disk, what the user's code closed or replaced, or an exception that cannot even be formatted.
            with contextlib.suppress(Exception):
                lines = "".join(traceback.format_exception(error))
                print(escaped_paragraph(lines), end="", file=sys.stderr, flush=True)
        return outcome_of_exception(error)

    def _send(self, index: int, outcome: SampleOutcome) -> None:
        self._tell({"place": index, "outcome": asdict(outcome)})

    def _tell(self, message: dict[str, Any]) -> None:
        if os.getpid() != self.worker_pid:
            os._exit(1)  # the user's function forked, and its child came back to us
        framing.write(self.channel, json.dumps(message).encode())


def _seed(name: str, sample: Sample) -> None:
    """Seed Python's and NumPy's generators, so that a random reward is the same in any worker and after a restart."""
    random.seed(f"{name}:{sample.sample_id}")
    # NumPy is seeded only if a reward has imported it; an import here would take time and memory in every worker.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(sample.sample_id % 2**32)


IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that the supervisor ignores and its workers do not. A scheduler sends them to every process of a job, and the
rank may still need rewards before it saves and ends."""
_MOST_OUTCOME_BYTES = 1 << 24


@dataclass(frozen=True)
class Task:
    """One reward and the samples that it scores, by their indices in the request."""

    reward: int
    samples: tuple[int, ...]
    again: bool = False
    """Whether this is the second try, after a signal killed the first worker; the samples need not have caused that."""


@dataclass(eq=False)
class Worker:
    """A forked worker process and its present task, as the supervisor sees it."""

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
    """Fork a worker that leads a new session, so that it can be killed together with everything it starts.

    Args:
        scorers: All rewards, ready to be called.
        inherited, pipes: What the supervisor has open; the worker closes its copies.
    """
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for channel in inherited:
            channel.close()
        for pipe in pipes:
            os.close(pipe)
        _live(theirs.detach(), scorers, supervisor)
    theirs.close()
    ours.setblocking(False)
    return Worker(pid, ours)


def _live(channel: int, scorers: Sequence[ReadyReward], supervisor: int) -> None:
    status = 1
    try:
        # With a session of its own, the worker and everything that it starts can be killed as one process group.
        os.setsid()
        kernel.die_with_parent()
        if os.getppid() == supervisor:
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            serve(channel, scorers)
            status = 0
    except BaseException:  # noqa: BLE001 - the process edge: nothing may run on into the supervisor's code
        traceback.print_exc()
    finally:
        # Not sys.exit: that would run the supervisor's exit handlers and flush its buffers a second time, in the fork.
        os._exit(status)


def was_killed(status: int | None) -> bool:
    """Return whether a wait status says that a signal ended the process."""
    return status is not None and os.WIFSIGNALED(status)


def how_worker_ended(status: int | None) -> str:
    """Describe a wait status; None means that the process was killed and has not ended."""
    if status is None:
        return "it hangs in the kernel and cannot be killed"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}, perhaps for want of memory" if code == -signal.SIGKILL else f"signal {-code}"
