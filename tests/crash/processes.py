"""Ranks that may die: processes of their own for one case, forked from one that has imported torch already.

They meet through a file, not through a server in rank 0, so that killing rank 0 leaves the others their own end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    """Exit code; minus the signal that killed it."""
    value: Any = None
    error: tuple[str, str] | None = None
    """Type and message of what it raised."""

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL


def _serve(connection: Connection, rank: int, size: int, place: str, function: Any, args: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist

    from holdfast.parallel.failure.channel import FailureChannel
    from holdfast.parallel.mesh import World

    torch.set_num_threads(1)
    store = dist.FileStore(f"{place}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world = World(rank, size, rank, torch.device("cpu"), FailureChannel(store, rank, size))
    try:
        outcome: Any = (function(world, *args), None)
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        outcome = (None, (type(error).__name__, str(error), traceback.format_exc()))
    with contextlib.suppress(OSError):
        connection.send(outcome)


class DoomedRanks:
    """Ranks that run one function once."""

    def __init__(self, function: Callable[..., Any], size: int, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-doomed-")
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, self._folder.name, function, args), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self._processes[rank].pid, number)

    def wait(self, timeout_seconds: float = 90.0, *, of: Sequence[int] | None = None) -> list[Ended]:
        """Return how ranks ended; whoever has not by then is killed and fails the test."""
        deadline = time.monotonic() + timeout_seconds
        ended = []
        for rank in range(len(self._processes)) if of is None else of:
            value, error = None, None
            with contextlib.suppress(EOFError, OSError):
                if self._connections[rank].poll(max(0.0, deadline - time.monotonic())):
                    value, error = self._connections[rank].recv()
            self._processes[rank].join(max(0.1, deadline - time.monotonic()))
            code = self._processes[rank].exitcode
            assert code is not None, f"rank {rank} did not end within {timeout_seconds} s"
            ended.append(Ended(code, value, error and error[:2]))
        return ended

    def close(self) -> None:
        """Kill whoever is left."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(20)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def run_doomed(function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = 90.0) -> list[Ended]:
    """Run function(world, *args) on ranks of their own and return how each ended."""
    ranks = DoomedRanks(function, size, *args)
    try:
        return ranks.wait(timeout_seconds)
    finally:
        ranks.close()


def acknowledged(directory: Path) -> list[int]:
    """Return the steps that a run was told are committed."""
    file = directory.parent / f"{directory.name}.acknowledged"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def acknowledge(directory: Path, step: int) -> None:
    """Note that a run was told that a step is committed."""
    with (directory.parent / f"{directory.name}.acknowledged").open("a") as file:
        file.write(f"{step}\n")
        file.flush()
        os.fsync(file.fileno())
