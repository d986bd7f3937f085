"""Starts the processes of a run's trackers, checks that they live, and ends them.

Nothing here waits, but for `close`, which waits `tracker_close_seconds` of patience.py in all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from holdfast import patience
from holdfast.config.sections.metrics import Tracker, UserTrackerConfig
from holdfast.errors import ConfigError
from holdfast.features.trackers.environment import tracker_environment
from holdfast.files import open_regular, python_module
from holdfast.text.escaping import escaped

_TAIL_BYTES = 4096
_PROGRAM = "holdfast.features.trackers.process"
_TRACKER_REAP_SECONDS = 0.5
"""For a killed tracker to go."""


def check_trackers(trackers: Sequence[Tracker], base: Path) -> None:
    """Refuse a tracker whose package or file is missing, while nothing has been written.

    Raises:
        ConfigError: It is missing.
    """
    for tracker in trackers:
        if isinstance(tracker, UserTrackerConfig):
            file = tracker.path.rpartition(":")[0]
            if not any(candidate.is_file() for candidate in (base / file, Path(file))):
                raise ConfigError(
                    f"metrics.sinks: there is no file {file} beside the YAML ({base}) or in {Path.cwd()}. "
                    "Correct its path."
                )
        elif tracker.kind != "csv" and not _is_installed(tracker.kind):
            raise ConfigError(f"metrics.sinks: {tracker.kind} needs a package: pip install 'holdfast[{tracker.kind}]'.")


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder `wandb` beside the command is not a package


class Trackers:
    """The trackers of a run; each is one process, which the run does not depend on."""

    def __init__(self, trackers: Sequence[Tracker], directory: Path, base: Path) -> None:
        self._processes = [_Process(tracker, directory, base) for tracker in trackers]
        self._next_look = 0.0

    def news(self) -> list[str]:
        """Return what became of trackers since the last call, each thing once."""
        seconds = time.monotonic()
        if not self._processes or seconds < self._next_look:
            return []
        self._next_look = seconds + patience.current.tracker_look_seconds
        return [text for process in self._processes if (text := process.news(seconds))]

    def close(self, status: str) -> list[str]:
        """End every process; return what the user must know of those that had not sent everything.

        Args:
            status: `finished` or `failed`.
        """
        for process in self._processes:
            process.ask_to_end(status)
        deadline = time.monotonic() + patience.current.tracker_close_seconds
        return [text for process in self._processes if (text := process.end(deadline))]


class _Process:
    def __init__(self, tracker: Tracker, directory: Path, base: Path) -> None:
        self._label, self._directory, self._base = tracker.label, directory, base
        self._log = directory / "logs" / f"tracker-{tracker.label}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble: str | None = None
        """What went wrong, as far as it was not yet said."""
        self._is_silent = False
        self._heard_at = time.monotonic()
        try:
            self._start(tracker.kind)
        except OSError as error:
            self._trouble = f"cannot be started: {error}"

    def _start(self, kind: str) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        folder = (self._directory / "trackers" / self._label).absolute()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*python_module(_PROGRAM), "--of-run", *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=tracker_environment(kind, folder),
                # Ctrl-C must not reach the tracker, which has to send the end of the run after the run has ended.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _arguments(self) -> list[str]:
        return [str(self._directory.absolute()), self._label, str(self._base.absolute())]

    def news(self, seconds: float) -> str | None:
        """Return a sentence about trouble that was not yet told."""
        process = self._process
        if process is not None:
            if self._heard(process):
                self._heard_at, self._is_silent = seconds, False
            if process.poll() is not None:
                self._process = None
                _close_pipes(process)
                self._trouble = f"ended with {_how(process.returncode)}{self._last_words()}"
            elif seconds - self._heard_at > patience.current.tracker_silent_seconds and not self._is_silent:
                self._is_silent = True
                self._trouble = f"has been silent for {seconds - self._heard_at:.0f} s"
        trouble, self._trouble = self._trouble, None
        return None if trouble is None else f"warning: tracker {self._label} {trouble}; the run goes on without it"

    def _heard(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout is not None
        try:
            return bool(os.read(process.stdout.fileno(), 1 << 16))
        except BlockingIOError:
            return False

    def ask_to_end(self, status: str) -> None:
        """Tell the process how the run ended."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{status}\n".encode())  # fits a pipe that nobody reads
            _close(self._process.stdin)

    def end(self, deadline: float) -> str | None:
        """Wait until the deadline, then kill; return a sentence if the tracker lacks something."""
        process = self._process
        if process is None:
            return None
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill_tree(process)
            seconds = patience.current.tracker_close_seconds
            reason = f"had not sent everything {seconds:g} s after the run's end, and was ended"
        else:
            reason = f"ended with {_how(process.returncode)}{self._last_words()}"
        finally:
            _close_pipes(process)
        if process.returncode == 0:
            return None
        arguments = " ".join(self._arguments())
        return (
            f"warning: tracker {self._label} {reason}. A resume sends what it lacks, and so does: "
            f"python -m {_PROGRAM} {arguments}"
        )

    def _last_words(self) -> str:
        """Return the last line of the log, where Python names the error."""
        try:
            with open_regular(self._log) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        line = next((line for line in reversed(lines) if line.strip()), "")
        return f" ({escaped(line.strip())[:300]}; see logs/{self._log.name})" if line else ""


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):  # nobody reads the other end any more
            pipe.close()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, those in sessions of their own too."""
    import psutil

    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        children = []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TRACKER_REAP_SECONDS)
