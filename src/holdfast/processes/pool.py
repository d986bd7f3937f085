"""The rank's end of the processes that run users' code.

A rank never runs it itself: what hangs, prints, forks or dies does so in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import patience
from holdfast.errors import ConfigError, RunStopped
from holdfast.files import python_module, read_end
from holdfast.processes import framing, kernel
from holdfast.text.escaping import escaped

# One thread, or every worker would start as many as there are cores. A fixed hash seed, or sets would order their
# strings otherwise after a restart, and a sum over one would round otherwise. `env` changes both and nothing else.
_ENVIRONMENT = ("env", "OMP_NUM_THREADS=1", "PYTHONHASHSEED=0")
_RECEIVED_BYTES = 1 << 18
_MOST_SHOWN_LINES, _MOST_SHOWN_BYTES = 3, 1000
"""Of what a user's file printed, in a message."""


@dataclass(frozen=True)
class Reply:
    """What became of a request to a worker: one of its answers, or a fault that ends it."""

    key: int
    seconds: float
    """From the request."""
    is_last: bool
    """Whether nothing more comes of this request."""
    answer: Mapping[str, Any] | None = None
    """None where there is a fault."""
    fault: str = ""
    """`timeout`, `died`, `lied` (it said what is no answer), `gone` (it had ended before), or the word of `kill`."""
    how: str = ""
    """How the process of a worker ended."""
    was_killed: bool = False
    """Whether a signal ended it, which may have come from outside."""


class WorkerPool:
    """Workers in processes that can be killed; a context manager that starts and closes them.

    Threads may ask at the same time; one at a time receives.

    A fork server stands between this process and the workers, which are known by keys. It sends a message every second
    while it works on a request; after `silent_seconds` without one it is killed.

    Args:
        kind: What workers do, as `reward` or `environment`.
        log_dir: Where they print.
        silent_seconds: After which the fork server is given up.
    """

    def __init__(self, kind: str, log_dir: Path, silent_seconds: float) -> None:
        self._kind, self._silent_seconds = kind, silent_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._incoming = framing.MessageReader()
        self._asked: set[int] = set()
        """Keys of workers that have not given their last answer."""
        self._heard_at = 0.0
        """When something was last received, or first asked after everything had been answered."""
        self.log_path = log_dir / f"{kind}s-{os.uname().nodename}-{os.getpid()}.log"
        """What users' code prints, tracebacks included."""
        self.log_is_named = False
        """Whether an error message has named the log, which must then be kept."""
        self._new_log: str | None = None
        self._sending = threading.Lock()
        self._given_up: RunStopped | None = None
        """Reason why the fork server was ended, which every thread is told."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and import every user file in them; started already, do nothing.

        Raises:
            ConfigError: A user's code cannot work.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End every process; closed already, do nothing."""
        self._end(patience.current.pool_close_seconds)

    def move_log(self, folder: Path) -> None:
        """Copy the log into another folder; users' code prints there from the next request on.

        Raises:
            OSError: It cannot be copied.
        """
        target = folder / self.log_path.name
        shutil.copyfile(self.log_path, target)
        self.log_path, self._new_log = target, str(target)

    def _start(
        self, entry: str, setup: Mapping[str, Any], subject: str, seconds: float, advice: str
    ) -> Mapping[str, Any]:
        """Start the processes; return what `Work.ready` says.

        Args:
            entry: `module:function` that makes the work.
            setup: What it takes.
            subject: What is imported first, for messages.
            seconds: Longest time for imports.
            advice: What to do where they take longer.

        Raises:
            ConfigError: A user's code cannot work.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # An earlier process with the same number may have written to it.
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [*_ENVIRONMENT, *python_module("holdfast.processes.worker"), str(self.log_path), entry]
        # Ctrl-C is sent to the terminal's process group; in a session of its own, the pool survives until the rank ends
        # it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._incoming = framing.MessageReader()
        self._asked.clear()
        try:
            return self._ready(setup, subject, seconds, advice, log_start)
        except BaseException:
            self._end(0.0)
            raise

    def _ready(
        self, setup: Mapping[str, Any], subject: str, seconds: float, advice: str, log_start: int
    ) -> Mapping[str, Any]:
        requests, replies = self._channels()
        deadline = time.monotonic() + seconds
        try:
            framing.write(requests, pickle.dumps(setup))
            while (reply := framing.read_frame(replies, deadline)) is not None:
                match json.loads(reply):
                    case {"importing": str(name)}:
                        subject = name
                    case {"mistake": str(mistake)}:
                        raise ConfigError(mistake)
                    case {"ready": dict(ready)}:
                        return ready
        except BrokenPipeError:
            pass
        except TimeoutError:
            raise ConfigError(f"{subject}: its file is still being imported after {seconds:g} s. {advice}") from None
        # A run that is refused leaves no log behind.
        lines = read_end(self.log_path, _MOST_SHOWN_BYTES, log_start).strip().splitlines()
        printed = f" It printed last: {escaped(' | '.join(lines[-_MOST_SHOWN_LINES:]))}." if lines else ""
        raise ConfigError(
            f"{subject}: importing its file ended the process{self._how()}.{printed} Import the file in a Python of "
            "your own."
        )

    def _ask(self, key: int, request: object, seconds: float, *, begins: bool, answers: int = 1) -> None:
        """Ask a worker for answers.

        Args:
            key: Of the worker.
            request: Pickled here, and unpickled in the worker alone, where the user's file is imported.
            seconds: Longest wait for each answer.
            begins: Whether a worker is made if there is none of this key.
            answers: How many there will be.
        """
        if not self._asked:
            self._heard_at = time.monotonic()
        self._asked.add(key)
        self._send("ask", key, seconds, answers, begins, pickle.dumps(request), self._new_log)

    def _kill(self, key: int, fault: str) -> None:
        """Kill a worker with everything it started; if something is asked of it, its reply has this fault."""
        self._send("kill", key, fault)

    def _leave(self, key: int) -> None:
        """Let a worker close what it has and end; there is no reply."""
        self._asked.discard(key)
        self._send("leave", key)

    def _receive(self, wait_seconds: float | None) -> list[Reply]:
        """Return the replies that have come.

        Args:
            wait_seconds: Longest wait for the first; None waits for it.

        Raises:
            RunStopped: The fork server died, or has been silent for too long although something is asked.
        """
        _, replies = self._channels()
        end = None if wait_seconds is None else time.monotonic() + wait_seconds
        while True:
            left = self._silent_seconds if end is None else max(0.0, end - time.monotonic())
            if not framing.is_readable(replies, min(left, self._silent_seconds)):
                self._check_silence(replies, is_asked=bool(self._asked) or end is None)
                if end is not None:
                    return []
                continue
            received = os.read(replies, _RECEIVED_BYTES)
            self._heard_at = time.monotonic()
            if not received:
                raise self._died()
            messages = [json.loads(message) for message in self._incoming.feed(received)]
            if answered := [Reply(**message) for message in messages if "key" in message]:  # the others: signs of life
                self._asked -= {reply.key for reply in answered if reply.is_last}
                return answered

    def _check_silence(self, replies: int, *, is_asked: bool) -> None:
        """Give the fork server up whose sign of life is overdue; without a request there is none.

        Raises:
            RunStopped: It hangs.
        """
        if not is_asked or time.monotonic() - self._heard_at < self._silent_seconds:
            return
        # A process that was suspended together with this one gets time for another sign.
        if not framing.has_come(replies, 2 * patience.current.sign_of_life_seconds):
            raise self._hangs()

    def _send(self, *message: object) -> None:
        requests, _ = self._channels()
        try:
            with self._sending:
                framing.write(requests, pickle.dumps(message), self._silent_seconds)
        except BrokenPipeError:
            raise self._died() from None
        except TimeoutError:
            raise self._hangs() from None

    def _hangs(self) -> RunStopped:
        self._end(0.0)
        self._given_up = RunStopped(
            f"The {self._kind} processes have said nothing for {self._silent_seconds:g} s. Read {self._log()}; they "
            "may have been stopped, or hang in a file system. Then start the run again."
        )
        return self._given_up

    def _died(self) -> RunStopped:
        return RunStopped(
            f"The {self._kind} processes died{self._how()}. Read {self._log()}, then start the run again."
        )

    def _log(self) -> str:
        """Return the path of the log for a message; it may be moved to a run directory that is created later."""
        self.log_is_named = True
        return str(self.log_path) if self.log_path.exists() else f"logs/{self.log_path.name} in the run's directory"

    def _how(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" with signal {-code}" if code < 0 else f" with exit code {code}"

    def _channels(self) -> tuple[int, int]:
        if self._process is None and self._given_up is not None:
            raise self._given_up
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def _end(self, timeout_seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its workers die with it: the kernel sees to that.
            kernel.kill_with_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience.current.pool_close_seconds)
            process.stdout.close()
