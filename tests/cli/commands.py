"""Runs of the real command that a test watches, signals, and counts the processes of."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import HOLDFAST
from tests.cli.warm import Done, WarmPython

MARK = "TEST_RUN_MARK"
"""An environment variable that every process of a run inherits."""


class LiveRun:
    """`holdfast VERB run.yaml` at the head of a process group of its own, as a shell starts it.

    Args:
        directory: Where the run's file is, and where the command is started.
        name: Of the file and the run.
        verb: What is run.
        warm: Whose Python starts the ranks; None: as users start them. A rank's process id is then that of a process
            which stands for it: signals reach the rank, SIGSTOP aside, and what it opens is not seen there.
    """

    def __init__(self, directory: Path, name: str = "run", verb: str = "sft", warm: WarmPython | None = None) -> None:
        self.directory = directory / "runs" / name
        self._mark = f"{MARK}={directory}".encode()
        self._outputs = directory / "out.txt", directory / "err.txt"
        program = [HOLDFAST] if warm is None else [warm.launcher, "-m", "holdfast.cli.main"]
        with self._outputs[0].open("w") as out, self._outputs[1].open("w") as err:
            self._process = subprocess.Popen(
                [*program, verb, f"{name}.yaml"],
                cwd=directory,
                env={**os.environ, MARK: str(directory)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def told(self) -> str:
        """Return what stands on standard error so far."""
        return self._outputs[1].read_text()

    def press_ctrl_c(self) -> None:
        """Do what a terminal does: SIGINT for everything in the foreground process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Do what `kill` and schedulers do: SIGTERM for the command alone."""
        self._process.terminate()

    def ask_for_a_save(self) -> None:
        """Send SIGUSR1 to the command alone."""
        self._process.send_signal(signal.SIGUSR1)

    def wait_for(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.is_running, self.told
            assert time.monotonic() < deadline, "what the test waits for did not happen"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        file = self.directory / "metrics.jsonl"
        self.wait_for(lambda: file.exists() and len(read_metrics(file)) >= step)

    def end(self, seconds: float = 30.0) -> tuple[Done, float]:
        """Wait for the end; return it, and how long it took."""
        began = time.monotonic()
        code = self._process.wait(timeout=seconds)
        took = time.monotonic() - began
        return Done(code, self._outputs[0].read_text(), self.told), took

    def processes(self) -> dict[int, list[bytes]]:
        """Return the environment of every process of the run that is alive, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if state not in "ZX" and self._mark in environ:
                found[int(entry.name)] = environ
        return found

    def rank(self, number: int) -> int:
        """Return a rank's process id; its children, if it has any, started after it."""
        return min(pid for pid, environ in self.processes().items() if f"RANK={number}".encode() in environ)

    def lines(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl, every line of which must be whole."""
        text = (self.directory / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        """End what a failed test left."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._process.wait(10)


def in_a_terminal(command: list[Any], directory: Path, columns: int = 160) -> tuple[str, int]:
    """Run a program on a terminal of its own; return all that the terminal received, and the exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    # A worker of the tests has a size of its own, which would count for more than the terminal's.
    environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    environ["TERM"] = "xterm"
    process = subprocess.Popen([str(word) for word in command], cwd=directory, env=environ, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    return shown.decode(), process.wait(timeout=30)
