"""The port at which the tasks of a step of `srun` meet: the first one asks its system, and tells the others."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress

from holdfast.errors import ConfigError

_FIRST, _PLACES, _TRIED = 20_000, 10_000, 32
"""Ports at which the first task can be asked: from one that follows from the step on, the first that it gets."""
_MEET_SECONDS = 120.0
_ANSWER_SECONDS = 2.0


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def agreed_port(host: str, name: str, task: int, tasks: int, seconds: float = _MEET_SECONDS) -> int:
    """Return a free port of the first task's machine, the same in all tasks.

    Args:
        host: Address of that machine.
        name: Tells the step from others, which may ask at the same ports.
        task: Number of this task.
        tasks: Number of tasks.
        seconds: Longest wait for the others.

    Raises:
        ConfigError: The first task does not answer.
    """
    start = sum(name.encode()) * 7919 % _PLACES  # any spread will do: who answers is told apart by the name
    places = [_FIRST + (start + number) % _PLACES for number in range(_TRIED)]
    deadline = time.monotonic() + seconds
    return _tell(places, name, tasks, deadline) if task == 0 else _ask(host, places, f"{name} {task}\n", deadline)


def _tell(places: list[int], name: str, tasks: int, deadline: float) -> int:
    port, told = free_port(), set[str]()
    with closing(_listening(places)) as server:
        server.settimeout(0.5)
        while len(told) < tasks - 1 and time.monotonic() < deadline:
            with suppress(OSError), closing(server.accept()[0]) as asking:
                asking.settimeout(_ANSWER_SECONDS)
                asked, _, task = asking.recv(256).decode(errors="replace").rstrip("\n").rpartition(" ")
                if asked == name:
                    asking.sendall(f"{port}\n".encode())
                    told.add(task)
    return port


def _listening(places: list[int]) -> socket.socket:
    for place in places:
        with suppress(OSError):
            return socket.create_server(("", place))
    raise ConfigError(
        f"The first task of the step found all of the ports {places[0]} to {places[-1]} in use. Set MASTER_PORT to a "
        "free one."
    )


def _ask(host: str, places: list[int], question: str, deadline: float) -> int:
    while time.monotonic() < deadline:
        for place in places:
            with suppress(OSError), closing(socket.create_connection((host, place), _ANSWER_SECONDS)) as first:
                first.sendall(question.encode())
                answer = first.recv(16).decode(errors="replace").strip()
                if answer.isdecimal():
                    return int(answer)
        time.sleep(0.2)
    raise ConfigError(
        f"The first task of the step does not say at {host} where the tasks meet. See its log, or set MASTER_ADDR and "
        "MASTER_PORT."
    )
