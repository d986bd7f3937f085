"""The port at which the tasks of a step of `srun` meet: the first one asks its system, and tells the others."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress

from holdfast.errors import ConfigError

_LOWEST_PORT, _PORTS, _PORTS_TRIED = 20_000, 10_000, 32
"""Ports at which the first task can be asked: from one that follows from the step on, the first that it gets."""
_WAIT_FOR_TASKS_SECONDS = 120.0
"""For the tasks of a step to be told."""
_ANSWER_SECONDS = 2.0
"""For the first task to answer, who may have others to answer before."""
_HEAR_SECONDS = 0.3
"""For a task that has asked to say more; while it says nothing no other one is answered."""


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with _bound() as probe:
        return int(probe.getsockname()[1])


def _bound() -> socket.socket:
    probe = socket.socket()
    probe.bind(("", 0))
    return probe


def agreed_port(host: str, name: str, task: int, tasks: int, seconds: float = _WAIT_FOR_TASKS_SECONDS) -> int:
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
    places = ports_to_ask(name)
    deadline = time.monotonic() + seconds
    return _tell(places, name, tasks, deadline) if task == 0 else _ask(host, places, f"{name} {task}\n", deadline)


def ports_to_ask(name: str) -> list[int]:
    """Return the ports at which the first task of a step can be asked, in the order in which it tries them."""
    start = sum(name.encode()) * 7919 % _PORTS  # any spread will do: who answers is told apart by the name
    return [_LOWEST_PORT + (start + number) % _PORTS for number in range(_PORTS_TRIED)]


def _tell(places: list[int], name: str, tasks: int, deadline: float) -> int:
    told = set[str]()
    with closing(_listening(places)) as server, closing(_bound()) as probe:
        port = int(probe.getsockname()[1])
        server.settimeout(0.5)
        while len(told) < tasks - 1 and time.monotonic() < deadline:
            with suppress(OSError), closing(server.accept()[0]) as asking:
                asking.settimeout(_HEAR_SECONDS)
                asked, _, task = asking.recv(256).decode(errors="replace").rstrip("\n").rpartition(" ")
                if asked == name:
                    asking.sendall(f"{port}\n".encode())
                    if asking.recv(1):  # the task has heard it
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
                    first.sendall(b"\n")
                    return int(answer)
        time.sleep(0.2)
    raise ConfigError(
        f"The first task of the step does not say at {host} where the tasks meet. See its log, or set MASTER_ADDR and "
        "MASTER_PORT."
    )
