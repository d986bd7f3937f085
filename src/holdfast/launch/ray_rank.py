"""One rank under Ray: what runs inside an actor. It imports neither Ray nor torch; the rank is a process of its own.

The actor only starts the rank, passes signals on and hands back what it prints. If the actor dies, however it does, the
guard of `launch/processes.py` ends the rank and what that has started.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

from holdfast.launch.processes import Guard

_MARK = "HOLDFAST_RAY_RANK"
_CHUNK = 1 << 16


class RankProcess:
    """Holds the process of one rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    def place(self) -> tuple[str, str, list[str]]:
        """Return this machine's address as Ray knows it, its name, and the GPUs that Ray gives this actor."""
        import ray

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), gpus or visible.split(",")[:0]

    def free_port(self) -> int:
        """Return a port at which nobody listens now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
        """Start the rank.

        Raises:
            FileNotFoundError: The folder is not there on this machine.
        """
        mark = f"{_MARK}={uuid.uuid4().hex}"
        environ = {**os.environ, **variables, _MARK: mark.partition("=")[2]}
        self._guard = Guard(mark, environ)
        self._process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)

    def read(self, seconds: float) -> tuple[bytes, int | None]:
        """Return what the rank has printed since, waiting for it, and its exit code once it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            chunk = os.read(self._process.stdout.fileno(), _CHUNK) if selector.select(seconds) else b""
        return chunk, None if chunk else self._process.poll()

    def send(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.Signals(number))
