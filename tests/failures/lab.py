"""Where the failures are made: pools of ranks, a folder, and what was observed."""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.parallel.stream import full_tensor
from tests.ranks import RankPool


@dataclass(frozen=True)
class Observed:
    """What one way of doing it came to."""

    holds: bool
    """Whether state and numbers are what they must be."""
    words: str
    """One line for the table."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What tests look at."""


@dataclass(frozen=True)
class Failure:
    """A failure, made to happen in the naive way and then in ours."""

    number: str
    title: str
    naive: Callable[[Lab], Observed]
    ours: Callable[[Lab], Observed]
    not_here: str = ""
    """What of it needs a GPU or a library that is not installed."""
    rescued: Callable[[Lab], Observed] | None = None
    """What the plug-ins, the checks for any script or an import make of it in the trainer that it was reported of."""


@dataclass
class Lab:
    """Processes and a folder for one case."""

    pool: Callable[[int], RankPool]
    folder: Path

    def path(self, name: str) -> str:
        """Return a path for a case's files."""
        return str(self.folder / name)


def doomed(function: Callable[..., Any], *args: Any, seconds: float = 20.0) -> list[tuple[str, str]]:
    """Run a function on two ranks of their own that nobody uses again.

    Returns:
        For each rank what it did (`ok`, an error's class, a signal's name or `hangs`) and its error's message.
    """
    pool = RankPool(2)
    found: dict[int, tuple[str, str]] = {}
    try:
        pool._start()
        pipes = dict(enumerate(pool._connections))
        for pipe in pipes.values():
            pipe.send((function, args))
        deadline = time.monotonic() + 300  # importing torch takes long where others work too
        while len(found) < pool.size and time.monotonic() < deadline:
            ready = wait([pipe for rank, pipe in pipes.items() if rank not in found], deadline - time.monotonic())
            for rank in [rank for rank, pipe in pipes.items() if pipe in ready]:
                try:
                    ok, value = pipes[rank].recv()
                    found[rank] = ("ok", "") if ok else (value[0], value[1])
                except EOFError:
                    found[rank] = (_death(pool, rank), "")
            deadline = min(deadline, time.monotonic() + seconds)
    finally:
        pool.close(kill=True)
    return [found.get(rank, ("hangs", "")) for rank in range(pool.size)]


def _death(pool: RankPool, rank: int) -> str:
    process = pool._processes[rank]
    process.join(5)
    return signal.Signals(-process.exitcode).name if (process.exitcode or 0) < 0 else "exits"


def largest_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative error over tensors, by their norms."""
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))
    errors = [
        float((found[name].double() - right.double()).norm() / right.double().norm().clamp_min(1e-12))
        for name, right in expected.items()
    ]
    return max(errors)


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a sharded model's whole gradients by torch's names; zeros where there is none."""
    return {
        name: full_tensor(value.grad).clone() if value.grad is not None else torch.zeros(value.shape)
        for name, value in model.named_parameters()
    }


def last_words(error: BaseException | str, length: int = 160) -> str:
    """Return the part of a message that starts at its last error class, on one line."""
    text = " ".join(str(error).split())
    start = max(text.rfind("RuntimeError"), text.rfind("KeyError"), 0)
    return text[start : start + length]


def first_line(outcome: tuple[str, str], length: int = 90) -> str:
    """Return an error as `Class: message`, cut."""
    kind, message = outcome
    text = re.sub(r"^\[[^ ]*\] ", "", " ".join(message.split()))  # a file of the library's
    return f"{kind}: {text[:length]}{'...' if len(text) > length else ''}" if text else kind


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process that has no other ranks, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *args).result()
