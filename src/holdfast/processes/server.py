"""The process between a rank and its workers: it forks them, passes messages, and kills what takes too long.

Invariant: every request gets its answers or one fault, whatever user code does. The server runs no user code after the
imports, so nothing can block it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from socket import socket
from typing import Any

from holdfast import patience
from holdfast.files import parse_json
from holdfast.processes import framing, kernel
from holdfast.processes.forks import IGNORED, Work, Worker, describe_end, fork, print_into

_MOST_LOG_BYTES = 1 << 26
_RECEIVED_BYTES = 1 << 18


class ForkServer:
    """Serves the requests of one rank.

    A message of the rank is a pickled tuple: `("ask", key, seconds, answers, begins, payload, log)`,
    `("kill", key, fault)` or `("leave", key)`.
    """

    def __init__(self, work: Work, requests: int, replies: int) -> None:
        self._work, self._requests, self._replies = work, requests, replies
        self._parent = os.getppid()
        self._incoming = framing.MessageReader()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        os.set_blocking(replies, False)
        self._workers: dict[int, Worker] = {}
        """By process number."""
        self._present: dict[int, Worker] = {}
        """By key, without those that leave."""
        self._log: str | None = None
        """Path of the log, if it has changed since the start."""
        self._kept = set(work.kept)
        self._left: set[int] = set()
        """Processes that were killed and have not ended yet."""
        self._is_wanted = True
        self._must_sweep = False
        """Whether what a worker left must be gone before the rank hears of its end."""
        self._heard_at = self._swept_at = self._signed_at = 0.0

    def run(self) -> None:
        """Serve until the rank closes the channel or dies; leave no process behind."""
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        try:
            while self._is_wanted and os.getppid() == self._parent:
                self._serve_once()
        finally:
            for worker in list(self._workers.values()):
                self._kill(worker)
            self._kept.clear()
            self._sweep()

    def _serve_once(self) -> None:
        is_asked = any(worker.is_asked for worker in self._workers.values())
        limits = patience.current
        tick_seconds = limits.supervisor_tick_seconds if is_asked else limits.supervisor_idle_tick_seconds
        for key, events in self._selector.select(tick_seconds):
            self._heard_at = time.monotonic()
            if key.fileobj == self._requests:
                self._hear_the_rank()
            elif key.fileobj != self._replies:
                worker: Worker = key.data
                if self._workers.get(worker.pid) is worker:
                    self._attend(worker, events)
        self._find_the_dead()
        self._end_the_overdue()
        self._look_after(is_asked=is_asked)

    def _hear_the_rank(self) -> None:
        received = os.read(self._requests, _RECEIVED_BYTES)
        self._is_wanted = bool(received)
        for message in self._incoming.feed(received):
            match pickle.loads(message):  # noqa: S301 - from our own parent
                case ("ask", key, seconds, answers, begins, payload, log):
                    if log != self._log:
                        self._log = log
                        print_into(log)
                    self._ask(self._worker_of(key, begins=begins), key, payload, seconds, answers)
                case ("kill", key, fault):
                    self._kill_for_the_rank(key, fault)
                case ("leave", key):
                    self._let_go(key)

    def _worker_of(self, key: int, *, begins: bool) -> Worker | None:
        self._find_the_dead()  # such as one that ended by itself while nothing was asked of it
        worker = self._present.get(key)
        return self._fork(key) if worker is None and begins else worker

    def _fork(self, key: int) -> Worker:
        channels = [worker.channel for worker in self._workers.values()]
        inherited: list[selectors.BaseSelector | socket] = [self._selector, *channels]
        worker = fork(key, self._work, inherited, (self._requests, self._replies))
        self._workers[worker.pid] = self._present[key] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _ask(self, worker: Worker | None, key: int, payload: bytes, seconds: float, answers: int) -> None:
        if worker is None:
            self._fault(key, "gone")
            return
        worker.number += 1
        worker.outgoing += framing.frame(pickle.dumps((worker.number, self._log, payload)))
        worker.missing, worker.seconds, worker.asked_at = answers, seconds, time.monotonic()
        worker.deadline = worker.asked_at + seconds
        self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _kill_for_the_rank(self, key: int, fault: str) -> None:
        worker = self._present.get(key)
        if worker is not None:
            self._hear_the_rest(worker)
            self._end(worker, fault)

    def _let_go(self, key: int) -> None:
        worker = self._present.pop(key, None)
        if worker is None:
            return
        worker.is_leaving = True
        worker.deadline = time.monotonic() + patience.current.pool_close_seconds
        with contextlib.suppress(OSError):
            worker.channel.shutdown(1)  # it reads the end, closes what it has and goes

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
        except (framing.BrokenChannel, ValueError) as error:
            _note(f"worker {worker.pid} sent no message of ours: {error}")
            self._end(worker, "lied")

    def _listen(self, worker: Worker) -> bool:
        """Pass on the answers that have arrived from a worker; return whether its channel is open.

        Raises:
            BrokenChannel, ValueError: It says what is no answer, or more than it was asked.
        """
        received = worker.channel.recv(_RECEIVED_BYTES)
        for message in worker.incoming.feed(received):
            if worker.is_leaving:
                continue
            number, _, text = message.partition(b" ")
            answer = parse_json(text)
            is_asked = worker.missing > 0 and number == b"%d" % worker.number
            if not is_asked or not self._work.is_answer(answer):
                raise framing.BrokenChannel("no answer, or one that nobody asked for")
            now = time.monotonic()
            worker.missing -= 1
            worker.deadline = now + worker.seconds if worker.missing else None
            self._say(worker.key, now - worker.asked_at, is_last=not worker.missing, answer=answer)
        return bool(received)

    def _hear_the_rest(self, worker: Worker) -> bool:
        """Pass on what a worker has said, so that it is blamed for no more; return whether its channel is open."""
        if worker.is_leaving:
            return True  # it may say anything, without an end
        with contextlib.suppress(OSError, framing.BrokenChannel, ValueError):
            while self._listen(worker):
                pass
            return False
        return True

    def _lose(self, worker: Worker, status: int | None = None) -> None:
        """Answer for a worker that ended, or whose channel did."""
        self._hear_the_rest(worker)
        self._end(worker, "died", status)

    def _end(self, worker: Worker, fault: str, status: int | None = None) -> None:
        """Kill a worker, and say why if something is asked of it.

        Args:
            worker: The worker.
            fault: Why.
            status: Its wait status, if it was reaped before.
        """
        status = self._kill(worker, status)
        if worker.is_asked:
            self._must_sweep = True
            was_killed = status is not None and os.WIFSIGNALED(status)
            self._fault(worker.key, fault, time.monotonic() - worker.asked_at, describe_end(status), was_killed)

    def _end_the_overdue(self) -> None:
        for worker in [worker for worker in self._workers.values() if worker.is_overdue]:
            is_open = self._hear_the_rest(worker)
            if worker.is_overdue:
                self._end(worker, "timeout" if is_open else "died")

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
            self._kept.discard(pid)
            if pid in self._workers:
                self._lose(self._workers[pid], status)

    def _kill(self, worker: Worker, status: int | None = None) -> int | None:
        """Kill a worker with everything in its session; return its wait status if it has gone."""
        del self._workers[worker.pid]
        if self._present.get(worker.key) is worker:
            del self._present[worker.key]
        self._selector.unregister(worker.channel)
        worker.channel.close()
        kernel.kill_with_group(worker.pid)
        if status is None:
            status = self._reap([worker.pid]).get(worker.pid)
        if self._work.clear is not None:
            self._work.clear(worker.pid)
        return status

    def _reap(self, pids: Iterable[int]) -> dict[int, int]:
        ended = kernel.reap(pids, patience.current.supervisor_kill_seconds)
        self._left |= set(pids) - ended.keys()  # `_find_the_dead` reaps them once they go
        return ended

    def _sweep(self) -> None:
        """Kill orphans that have become children of this process, then the orphans that those deaths leave."""
        self._swept_at, self._must_sweep = time.monotonic(), False
        while strays := [
            pid for pid in kernel.children() if pid not in self._workers and pid not in self._left | self._kept
        ]:
            for pid in strays:
                kernel.kill_with_group(pid)
            self._reap(strays)

    def _look_after(self, *, is_asked: bool) -> None:
        """Sweep what escaped its worker, keep the log small, and let the rank hear."""
        now = time.monotonic()
        is_quiet = not is_asked and self._swept_at > self._heard_at
        is_time = now - self._swept_at >= patience.current.supervisor_tick_seconds and not is_quiet
        if self._must_sweep or is_time:
            self._sweep()
        if os.fstat(2).st_size > _MOST_LOG_BYTES:
            # The log is opened with O_APPEND, so writers continue at the new end and leave no hole of zeros.
            os.ftruncate(2, 0)
            _note("the log was full and starts again")
        if is_asked and now - self._signed_at >= patience.current.sign_of_life_seconds:
            self._signed_at = now
            self._tell({"workers": len(self._workers)})
        self._flush()

    def _fault(self, key: int, fault: str, seconds: float = 0.0, how: str = "", was_killed: bool = False) -> None:
        self._say(key, seconds, is_last=True, fault=fault, how=how, was_killed=was_killed)

    def _say(self, key: int, seconds: float, **message: Any) -> None:
        self._tell({"key": key, "seconds": seconds, **message})

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._outgoing += framing.frame(json.dumps(message).encode())

    def _flush(self) -> None:
        """Write what the rank takes now: a rank that computes reads later, and nobody may wait for it here."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._replies, self._outgoing)]
        except BlockingIOError:
            if self._replies not in self._selector.get_map():
                self._selector.register(self._replies, selectors.EVENT_WRITE)
            return
        except BrokenPipeError:
            self._is_wanted = False
            return
        if self._replies in self._selector.get_map():
            self._selector.unregister(self._replies)


def _note(text: str) -> None:
    """Write into the log, if its disk has room."""
    with contextlib.suppress(OSError):
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
