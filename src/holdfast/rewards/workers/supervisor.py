"""The process between a rank and its reward workers: it forks workers, gives them tasks, and kills those that time out.

Invariant: every sample of a request gets exactly one outcome from every reward, whatever user code does. The supervisor
runs no user code after the imports, so nothing can block it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from selectors import BaseSelector
from socket import socket
from types import MappingProxyType
from typing import Any

from holdfast import patience
from holdfast.rewards.base import SampleOutcome
from holdfast.rewards.functions.signatures import BatchedCall, PerSampleCall
from holdfast.rewards.processes import folders, framing, kernel
from holdfast.rewards.scorers import ReadyReward
from holdfast.rewards.workers.fork_server import (
    IGNORED,
    Task,
    Worker,
    fork,
    how_worker_ended,
    print_into,
    was_killed,
)

_MOST_LOG_BYTES = 1 << 26
_RECEIVED_BYTES = 1 << 18


class Supervisor:
    """Serves the requests of one rank."""

    def __init__(self, scorers: Sequence[ReadyReward], settings: dict[str, Any], requests: int, replies: int) -> None:
        self._scorers, self._replies = scorers, replies
        self._most_workers: int = settings["workers"]
        self._batch_size: int = settings["batch_size"]
        self._step_seconds: float | None = settings["step_seconds"]
        self._parent = os.getppid()
        self._requests = requests
        self._incoming = framing.MessageReader()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._workers: dict[int, Worker] = {}
        self._samples: list[bytes] = []
        self._log: str | None = None
        """Path of the log, if it has changed since the start."""
        self._queue: deque[Task] = deque()
        self._outcomes: list[list[SampleOutcome | None]] | None = None
        """[reward][sample] outcomes of the present request; None between requests."""
        self._missing = 0
        self._cut_at = math.inf
        """Deadline of the present request, after which the samples without an outcome count as timed out."""
        self._heard_of_at = 0.0
        self._left: set[int] = set()
        """Processes that were killed and have not ended yet."""
        self._is_wanted = True

    def run(self) -> None:
        """Serve until the rank closes the channel or dies; leave no process behind."""
        # A scheduler signals every process of a job; the supervisor must live on, since the rank's last step needs
        # rewards.
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        try:
            while self._is_wanted and os.getppid() == self._parent:
                self._turn()
        finally:
            self._end(list(self._workers.values()))

    def _turn(self) -> None:
        self._hand_out()
        limits = patience.current
        tick_seconds = limits.supervisor_idle_tick_seconds if self._outcomes is None else limits.supervisor_tick_seconds
        for key, events in self._selector.select(tick_seconds):
            if key.data is None:
                self._hear_the_rank()
            elif key.data.pid in self._workers:
                self._attend(key.data, events)
        self._find_the_dead()
        self._end_the_overdue()
        self._cut_short()
        if os.fstat(2).st_size > _MOST_LOG_BYTES:
            # The log is opened with O_APPEND, so writers continue at the new end and leave no hole of zeros.
            os.ftruncate(2, 0)
            _note("the log was full and starts again")
        self._reply()

    def _hear_the_rank(self) -> None:
        received = os.read(self._requests, _RECEIVED_BYTES)
        self._is_wanted = bool(received)
        for message in self._incoming.feed(received):
            reward_indices, self._samples, log = pickle.loads(message)  # noqa: S301 - from our own parent
            if log != self._log:
                self._log = log
                print_into(log)
            count = len(self._samples)
            self._outcomes = [
                [None] * count if reward in reward_indices else [] for reward in range(len(self._scorers))
            ]
            self._missing = count * len(reward_indices)
            self._cut_at = math.inf if self._step_seconds is None else time.monotonic() + self._step_seconds
            tasks = [task for reward in reward_indices for task in self._tasks(reward, count)]
            # By completion, so that a request that is cut short has some that every reward has scored.
            self._queue = deque(sorted(tasks, key=lambda task: task.samples[0]))

    def _tasks(self, reward: int, count: int) -> Iterable[Task]:
        size = self._batch_size
        if isinstance(self._scorers[reward].bound, PerSampleCall):
            # Small enough that workers end together. Only here may the number of workers matter: samples are alone.
            size = min(size, max(1, count // (4 * self._most_workers)))
        for start in range(0, count, size):
            yield Task(reward, tuple(range(start, min(start + size, count))))

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers.values() if worker.task is None]
        while self._queue and (idle or len(self._workers) < self._most_workers):
            worker = idle.pop() if idle else self._fork()
            worker.task = self._queue.popleft()
            worker.waiting = list(worker.task.samples)
            worker.outgoing = framing.frame(
                pickle.dumps((worker.task.reward, [self._samples[index] for index in worker.task.samples], self._log))
            )
            self._give_time(worker)
            self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _fork(self) -> Worker:
        # Held open in the child, a sibling's channel would never end for that sibling.
        inherited: list[BaseSelector | socket] = [
            self._selector,
            *(worker.channel for worker in self._workers.values()),
        ]
        worker = fork(self._scorers, inherited, (self._requests, self._replies))
        self._workers[worker.pid] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _give_time(self, worker: Worker) -> None:
        assert worker.task is not None
        scorer = self._scorers[worker.task.reward]
        calls = len(worker.waiting) if isinstance(scorer.bound, BatchedCall) else 1
        worker.deadline = time.monotonic() + scorer.seconds * calls

    def _attend(self, worker: Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and worker.outgoing:
                worker.outgoing = worker.outgoing[worker.channel.send(worker.outgoing) :]
                if not worker.outgoing:
                    self._selector.modify(worker.channel, selectors.EVENT_READ, worker)
            if events & selectors.EVENT_READ and not self._listen(worker):
                self._lose(worker)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(worker)
        except framing.BrokenChannel as error:
            _note(f"worker {worker.pid} sent no message of ours: {error}")
            self._lose(worker, "wrote into the channel of its worker")

    def _listen(self, worker: Worker) -> bool:
        """Handle the messages that have arrived from a worker; return False if it closed its channel."""
        received = worker.channel.recv(_RECEIVED_BYTES)
        try:
            for message in worker.incoming.feed(received):
                self._hear(worker, json.loads(message))
        except (ValueError, LookupError, TypeError) as error:
            raise framing.BrokenChannel(repr(error)) from error
        return bool(received)

    def _hear(self, worker: Worker, message: dict[str, Any]) -> None:
        task = worker.task
        if task is None:
            raise ValueError(f"{message} without a task")
        if "place" in message:
            sample = task.samples[message["place"]]
            worker.waiting.remove(sample)
            self._record(task.reward, sample, SampleOutcome(**message["outcome"]))
            if not isinstance(self._scorers[task.reward].bound, BatchedCall):
                self._give_time(worker)
        elif "split" in message:
            self._again_alone(task, worker.waiting)
            worker.waiting = []
        else:
            worker.task = None

    def _record(self, reward: int, sample: int, outcome: SampleOutcome) -> None:
        assert self._outcomes is not None
        assert self._outcomes[reward][sample] is None
        self._outcomes[reward][sample] = outcome
        self._missing -= 1

    def _again_alone(self, task: Task, samples: Iterable[int]) -> None:
        alone = [Task(task.reward, (sample,), task.again) for sample in samples]
        self._queue.extendleft(reversed(alone))

    def _find_the_dead(self) -> None:
        """Reap children that ended. A grandchild may hold a worker's channel open, so its end shows only here."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._left.discard(pid)
            if pid in self._workers:
                self._lose(self._workers[pid], status=status)

    def _lose(self, worker: Worker, message: str = "", status: int | None = None) -> None:
        """Handle the samples of a worker that died; if several may have killed it, each is tried alone."""
        self._hear_the_rest(worker)
        ended = self._end([worker], {} if status is None else {worker.pid: status})
        if not message and was_killed(ended.get(worker.pid)) and self._asks_again(worker):
            return
        message = message or f"killed its worker ({how_worker_ended(ended.get(worker.pid))})"
        self._blame(worker, SampleOutcome(fault="error", message=message))

    def _asks_again(self, worker: Worker) -> bool:
        """Queue the task of a killed worker once more if this was its first try; return whether it was queued.

        The signal may have come from outside, such as the kernel when memory is short.
        """
        task, waiting = worker.task, worker.waiting
        if task is None or not waiting or task.again:
            return False
        # As one call of a batch again, so that its rewards are what they would have been.
        alone = isinstance(self._scorers[task.reward].bound, PerSampleCall)
        under_way, later = (waiting[:1], waiting[1:]) if alone else (waiting, [])
        if later:
            self._queue.appendleft(Task(task.reward, tuple(later)))
        self._queue.appendleft(Task(task.reward, tuple(under_way), again=True))
        return True

    def _hear_the_rest(self, worker: Worker) -> None:
        """Record the outcomes that a worker sent before it died, so that only unfinished samples are blamed."""
        with contextlib.suppress(OSError, framing.BrokenChannel):
            while self._listen(worker):
                pass

    def _end_the_overdue(self) -> None:
        late = [worker for worker in self._workers.values() if worker.is_overdue]
        for worker in late:
            self._hear_the_rest(worker)
        late = [worker for worker in late if worker.is_overdue]
        self._end(late)
        for worker in late:
            assert worker.task is not None
            seconds = self._scorers[worker.task.reward].seconds
            self._blame(worker, SampleOutcome(fault="timeout", message=f"gave no answer in {seconds:g} s"))

    def _cut_short(self) -> None:
        """End a request that takes too long: other ranks wait for its answer."""
        if self._outcomes is None or time.monotonic() < self._cut_at:
            return
        for worker in self._workers.values():
            self._hear_the_rest(worker)
        self._end([worker for worker in self._workers.values() if worker.task is not None])
        self._queue.clear()
        message = f"had no answer when all of them had taken {self._step_seconds:g} s (rewards.step_timeout_seconds)"
        for reward, line in enumerate(self._outcomes):
            for sample in [index for index, outcome in enumerate(line) if outcome is None]:
                self._record(reward, sample, SampleOutcome(fault="timeout", message=message, is_cut_short=True))

    def _blame(self, worker: Worker, outcome: SampleOutcome) -> None:
        task, waiting = worker.task, worker.waiting
        if task is None or not waiting:
            return
        if isinstance(self._scorers[task.reward].bound, PerSampleCall):
            self._record(task.reward, waiting[0], outcome)
            if waiting[1:]:
                self._queue.appendleft(Task(task.reward, tuple(waiting[1:])))
        elif len(waiting) == 1:
            self._record(task.reward, waiting[0], outcome)
        else:
            self._again_alone(task, waiting)

    def _end(self, workers: Sequence[Worker], ended: Mapping[int, int] = MappingProxyType({})) -> Mapping[int, int]:
        """Kill workers with everything they started; return the wait status of those that have gone.

        Args:
            workers: The workers to kill.
            ended: Wait statuses of those that were reaped before.
        """
        for worker in workers:
            del self._workers[worker.pid]
            self._selector.unregister(worker.channel)
            worker.channel.close()
            kernel.kill_with_group(worker.pid)
        reaped = self._reap([worker.pid for worker in workers if worker.pid not in ended])
        self._sweep()
        for worker in workers:
            folders.remove_of(worker.pid)
        return {**ended, **reaped}

    def _reap(self, pids: Sequence[int]) -> dict[int, int]:
        ended = kernel.reap(pids, patience.current.supervisor_kill_seconds)
        self._left |= set(pids) - ended.keys()  # `_find_the_dead` reaps them once they go
        return ended

    def _sweep(self) -> None:
        """Kill orphans that have become children of this process, then the orphans that those deaths leave."""
        while strays := [pid for pid in kernel.children() if pid not in self._workers and pid not in self._left]:
            for pid in strays:
                kernel.kill_with_group(pid)
            self._reap(strays)

    def _reply(self) -> None:
        """Send the reply of a request that is complete; otherwise say that it is being worked on."""
        if self._outcomes is None:
            return
        if self._missing:
            if time.monotonic() - self._heard_of_at >= patience.current.sign_of_life_seconds:
                self._heard_of_at = time.monotonic()
                self._tell({"missing": self._missing})
            return
        outcomes = [[asdict(outcome) for outcome in line if outcome is not None] for line in self._outcomes]
        self._outcomes, self._samples = None, []
        self._sweep()
        self._tell({"outcomes": outcomes})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            framing.write(self._replies, json.dumps(message).encode())
        except BrokenPipeError:
            self._is_wanted = False


def _note(text: str) -> None:
    """Write into the log, if its disk has room."""
    with contextlib.suppress(OSError):
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
