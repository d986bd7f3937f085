"""Rank pools: real processes over gloo that stay alive between tests, as importing torch takes longer than a case."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.data.batches.ahead import THREAD
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World
from tests.forked import end_with_tests

DESCRIPTORS = 700
"""Open files at which the processes of a pool are replaced by new ones; ordinary limits begin at 1,024."""

READER_SECONDS = 5.0
"""Longest wait for a thread that reads ahead; a test may have planted rows that hang."""


class RankError(AssertionError):
    """A case failed on some rank; the message holds that rank's traceback."""


def _serve(connection: Connection, rank: int, size: int, port: int, crash: str) -> None:
    torch.set_num_threads(1)
    end_with_tests()
    crashes = Path(crash).open("w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.enable(crashes)
    os.dup2(crashes.fileno(), 2)  # what C++ says before it aborts
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World(rank, size, rank, torch.device("cpu"), FailureChannel(store, rank, size))
    while True:
        task = connection.recv()
        if task is None:
            break
        function, args = task
        _end_readers()
        _forget_groups()
        try:
            result: Any = (True, function(world, *args))
        except BaseException as error:  # noqa: BLE001 - the edge of a process: everything goes back to the test
            result = (False, (type(error).__name__, str(error), traceback.format_exc()))
        connection.send(result)
    dist.destroy_process_group()
    os._exit(0)  # tearing an interpreter down that holds torch takes a second, and leaves nothing else behind


def _end_readers() -> None:
    """Wait for the threads that read ahead for runs that the task before did not close: they use groups of ranks."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(READER_SECONDS)


def _forget_groups() -> None:
    """Destroy the groups that the task before left; nobody uses them, since all ranks have answered.

    Each gloo group has threads that look for work a hundred times a second; five hundred of them stall the machine.
    """
    from holdfast.parallel.joint_calls import forget_groups

    forget_groups()
    world = dist.group.WORLD
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not world]:
        # torch remembers placements by meshes that are equal, and asks the earlier one for its groups.
        if not group.group_desc.startswith("mesh"):
            dist.destroy_process_group(group)


class RankPool:
    """`size` processes that run the same function together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._crashes = Path()
        """Where ranks write their stacks if they crash, in a file by rank."""

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 300.0) -> list[Any]:
        """Return function(world, *args) of every rank, by rank; raise RankError with the first traceback."""
        outcomes = self.outcomes(function, *args, timeout_seconds=timeout_seconds)
        for ok, value in outcomes:
            if not ok:
                raise RankError(value[2])
        return [value for _, value in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0) -> list[tuple[str, str]]:
        """Return (type name, message) of the error every rank raised; fail if one did not raise."""
        outcomes = self.outcomes(function, *args, timeout_seconds=timeout_seconds)
        silent = [rank for rank, (ok, _) in enumerate(outcomes) if ok]
        if silent:
            raise RankError(f"ranks {silent} raised nothing")
        return [(value[0], value[1]) for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_seconds: float) -> list[tuple[bool, Any]]:
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, args))
            except BrokenPipeError:
                self._ended(rank)
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.size:
            missing = [c for rank, c in enumerate(self._connections) if rank not in results]
            ready = wait(missing, timeout_seconds)
            if not ready:
                self.close(kill=True)
                raise RankError(f"ranks {sorted(set(range(self.size)) - set(results))} did not answer")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    results[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._ended(rank)
            if any(not ok for ok, _ in results.values()):
                timeout_seconds = min(timeout_seconds, 20.0)  # the others may hang in a collective without this rank
        if self._most_descriptors() > DESCRIPTORS:
            self.close()
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.size)]

    def _signal(self, number: int) -> None:
        """Let all ranks rest or go on: the threads of gloo groups, which nobody uses between tasks, never rest."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _ended(self, rank: int) -> NoReturn:
        """Say how a rank ended that should not have; the next test gets new ones."""
        process = self._processes[rank]
        process.join(5.0)
        stacks = (self._crashes / str(rank)).read_text(errors="replace")
        self.close(kill=True)
        message = f"rank {rank} of a pool of {self.size} ended with exit code {process.exitcode}"
        raise RankError(f"{message}\n{stacks}") from None

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._crashes = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (theirs, rank, self.size, port, str(self._crashes / str(rank)))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _most_descriptors(self) -> int:
        """Return how many files the fullest process holds: the groups of earlier tasks' meshes cannot be given back."""
        return max(len(list(Path(f"/proc/{process.pid}/fd").iterdir())) for process in self._processes)

    def close(self, *, kill: bool = False) -> None:
        """End the processes; a pool that is used again starts new ones."""
        self._signal(signal.SIGCONT)
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                connection.send(None)  # to all before any is waited for: they leave their groups together
        for connection, process in zip(self._connections, self._processes, strict=True):
            process.join(20)
            connection.close()
        if self._processes:
            shutil.rmtree(self._crashes)
        self._connections, self._processes = [], []
