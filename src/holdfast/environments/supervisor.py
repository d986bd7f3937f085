"""The process between a rank and its environments: forks one for each episode, passes on, kills what takes too long.

Protects one invariant: every request gets exactly one answer, whatever user code does. It runs no user code after the
imports, so nothing can block it. It starts as `python -m holdfast.environments.supervisor LOG`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from socket import socket
from typing import Any

from holdfast import patience
from holdfast.environments.agents import load_agent
from holdfast.environments.base import MOST_LEVELS, extent_of, is_answer
from holdfast.environments.instances import EnvironmentSource, load
from holdfast.environments.workers import Worker, fork
from holdfast.errors import ConfigError
from holdfast.files import parse_json
from holdfast.rewards.base import CannotStart
from holdfast.rewards.processes import framing, kernel
from holdfast.rewards.workers.fork_server import IGNORED, how_worker_ended, print_into
from holdfast.rewards.workers.worker import take_channels
from holdfast.text.escaping import escaped_paragraph

_MOST_LOG_BYTES = 1 << 26
_RECEIVED_BYTES = 1 << 18
_FIRST = ("begin", "run")
"""Requests that begin an episode."""


class Supervisor:
    """Serves the episodes of one rank."""

    def __init__(self, source: EnvironmentSource, settings: Mapping[str, Any], requests: int, replies: int) -> None:
        self._source = source
        self._seconds: float = settings["timeout_seconds"]
        self._memory_bytes: int = settings["memory_mib"] << 20
        self._requests, self._replies = requests, replies
        self._parent = os.getppid()
        self._incoming = framing.MessageReader()
        self._outgoing = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        os.set_blocking(replies, False)
        self._workers: dict[int, Worker] = {}
        """By episode."""
        self._leaving: dict[int, Worker] = {}
        """Workers that were told to close, by pid."""
        self._is_wanted = True
        self._swept_at = self._heard_of_at = 0.0
        self._left: set[int] = set()
        """Processes that were killed and have not gone."""

    def run(self) -> None:
        """Serve until the rank closes its end or dies; leave no process."""
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        try:
            while self._is_wanted and os.getppid() == self._parent:
                self._serve_once()
        finally:
            for worker in [*self._workers.values(), *self._leaving.values()]:
                self._kill(worker)
            self._sweep()

    def _serve_once(self) -> None:
        is_asked = any(worker.deadline is not None for worker in self._workers.values())
        limits = patience.current
        tick_seconds = limits.supervisor_tick_seconds if is_asked else limits.supervisor_idle_tick_seconds
        for key, events in self._selector.select(tick_seconds):
            if key.fileobj == self._requests:
                self._hear_the_rank()
            elif key.fileobj == self._replies:
                self._flush()
            elif key.data.pid in self._leaving or self._workers.get(key.data.episode) is key.data:
                self._attend(key.data, events)
        self._end_the_overdue()
        self._look_after(is_asked=is_asked)

    def _hear_the_rank(self) -> None:
        received = os.read(self._requests, _RECEIVED_BYTES)
        self._is_wanted = bool(received)
        for message in self._incoming.feed(received):
            name, episode, argument = pickle.loads(message)  # noqa: S301 - from our own parent
            if name == "log":
                print_into(pickle.loads(argument))  # noqa: S301 - as above
            elif name == "close":
                self._close(episode)
            else:
                if name in _FIRST:
                    self._fork(episode)
                self._ask(episode, name, argument)

    def _fork(self, episode: int) -> None:
        # Held open in the child, a sibling's channel would never end for that sibling.
        everyone = [*self._workers.values(), *self._leaving.values()]
        inherited: list[selectors.BaseSelector | socket] = [self._selector, *(worker.channel for worker in everyone)]
        worker = fork(episode, self._source, self._memory_bytes, inherited, (self._requests, self._replies))
        self._workers[episode] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _ask(self, episode: int, name: str, argument: Any) -> None:
        worker = self._workers.get(episode)
        if worker is None:  # it ended between two turns
            self._say(episode, {"fault": "died", "message": "ended between two turns"}, 0.0)
            return
        worker.outgoing += framing.frame(pickle.dumps((name, argument)))
        worker.asked_at = time.monotonic()
        worker.deadline = worker.asked_at + self._seconds
        self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _close(self, episode: int) -> None:
        worker = self._workers.pop(episode, None)
        if worker is None:
            return
        worker.deadline = time.monotonic() + patience.current.pool_close_seconds
        self._leaving[worker.pid] = worker
        with contextlib.suppress(OSError):
            worker.channel.shutdown(1)  # it reads the end, closes its environment and goes

    def _attend(self, worker: Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and worker.outgoing:
                worker.outgoing = worker.outgoing[worker.channel.send(worker.outgoing) :]
                if not worker.outgoing:
                    self._selector.modify(worker.channel, selectors.EVENT_READ, worker)
            if events & selectors.EVENT_READ:
                self._listen(worker)
        except BlockingIOError:
            pass
        except (OSError, framing.BrokenChannel, ValueError):
            self._lose(worker, "wrote into the channel of its worker, or closed it")

    def _listen(self, worker: Worker) -> None:
        received = worker.channel.recv(_RECEIVED_BYTES)
        for message in worker.incoming.feed(received):
            answer = parse_json(message)
            if worker.pid in self._leaving:
                continue
            if worker.deadline is None or not is_answer(answer):
                raise framing.BrokenChannel("no answer, or one that nobody asked for")
            if extent_of(answer).levels > MOST_LEVELS:
                raise framing.BrokenChannel("an answer that is nested too deeply")
            worker.deadline = None
            self._say(worker.episode, answer, time.monotonic() - worker.asked_at)
        if not received:
            self._lose(worker)

    def _lose(self, worker: Worker, message: str = "", status: int | None = None) -> None:
        """End a worker whose channel has ended, and answer for it."""
        was_asked = worker.deadline is not None and worker.pid not in self._leaving
        worker.deadline = None
        status = self._kill(worker, status)
        if was_asked:
            message = message or f"ended its process ({how_worker_ended(status)})"
            self._say(worker.episode, {"fault": "died", "message": message}, time.monotonic() - worker.asked_at)

    def _end_the_overdue(self) -> None:
        for worker in [worker for worker in self._workers.values() if worker.is_overdue]:
            with contextlib.suppress(OSError, framing.BrokenChannel, ValueError):
                self._listen(worker)
            if worker.is_overdue:
                self._kill(worker)
                message = f"gave no answer in {self._seconds:g} s"
                self._say(worker.episode, {"fault": "timeout", "message": message}, self._seconds)
        for worker in [worker for worker in self._leaving.values() if worker.is_overdue]:
            self._kill(worker)

    def _kill(self, worker: Worker, status: int | None = None) -> int | None:
        """Kill a worker with everything it started; return its wait status if it has gone.

        Args:
            worker: Whom.
            status: Its status, if it was reaped before.
        """
        if self._workers.get(worker.episode) is worker:
            del self._workers[worker.episode]
        self._leaving.pop(worker.pid, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
        worker.channel.close()
        # One that ended by itself has said how: its status is read before its group is killed.
        ended = kernel.reap([worker.pid], 0.0) if status is None else {worker.pid: status}
        kernel.kill_with_group(worker.pid)
        if not ended:
            ended = kernel.reap([worker.pid], patience.current.supervisor_kill_seconds)
        if not ended:
            self._left.add(worker.pid)
        return ended.get(worker.pid)

    def _look_after(self, *, is_asked: bool) -> None:
        """Sweep what escaped its worker, keep the log small, and say that requests are being worked on."""
        now = time.monotonic()
        if now - self._swept_at >= patience.current.supervisor_tick_seconds:
            self._swept_at = now
            self._find_the_dead()
            self._sweep()
            if os.fstat(2).st_size > _MOST_LOG_BYTES:
                os.ftruncate(2, 0)
                with contextlib.suppress(OSError):
                    print("holdfast: the log was full and starts again", file=sys.stderr, flush=True)
        if is_asked and now - self._heard_of_at >= patience.current.sign_of_life_seconds:
            self._heard_of_at = now
            self._tell({"alive": len(self._workers)})

    def _find_the_dead(self) -> None:
        """Notice a worker's own end where a grandchild still holds its channel open."""
        by_pid = {worker.pid: worker for worker in (*self._workers.values(), *self._leaving.values())}
        for pid, status in kernel.reap(by_pid, 0.0).items():
            self._lose(by_pid[pid], status=status)

    def _sweep(self) -> None:
        """Kill orphans that became our children; their own children become ours by that."""
        known = {worker.pid for worker in (*self._workers.values(), *self._leaving.values())}
        while strays := [pid for pid in kernel.children() if pid not in known and pid not in self._left]:
            for pid in strays:
                kernel.kill_with_group(pid)
            self._left |= set(strays) - kernel.reap(strays, patience.current.supervisor_kill_seconds).keys()

    def _say(self, episode: int, answer: Mapping[str, Any], seconds: float) -> None:
        self._tell({**answer, "episode": episode, "seconds": seconds})

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._outgoing += framing.frame(json.dumps(message).encode())
        self._flush()

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


def main() -> None:
    """Serve one rank's pool until the rank closes it or dies."""
    requests, replies = take_channels(Path(sys.argv[1]))
    settings = framing.read_frame(requests)
    if settings is None:
        return
    setup: dict[str, Any] = pickle.loads(settings)  # noqa: S301 - from our own parent
    try:
        section, base = setup["section"], Path(setup["base"])
        source = load_agent(section, base) if section["kind"] == "endpoint" else load(section, base)
    except (CannotStart, ConfigError) as error:
        framing.write(replies, json.dumps({"mistake": escaped_paragraph(str(error))}).encode())
        return
    sys.stdout.flush()
    kernel.adopt_orphans()
    # A collection in a worker would touch, and so copy, every page it shares with its siblings.
    gc.collect()
    gc.freeze()
    schemas = {name: [tool.schema for tool in kind.tools] for name, kind in source.kinds.items()}
    answering = [name for name, kind in source.kinds.items() if kind.answers]
    ready = {"tools": schemas, "replayable": source.replayable, "answering": answering}
    framing.write(replies, json.dumps({"ready": ready}).encode())
    Supervisor(source, setup, requests, replies).run()


if __name__ == "__main__":
    main()
