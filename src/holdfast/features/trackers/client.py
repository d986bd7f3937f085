"""The run's side of its trackers: a process, a queue and a pipe each.

Nothing here waits, but for `close`, which waits `tracker_close_seconds` of patience.py in all. A tracker answers every
row that it recorded with a byte, so what is lost is counted here, whatever ended the tracker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from holdfast import patience
from holdfast.config.sections.metrics import MetricsConfig, Tracker, UserTrackerConfig
from holdfast.errors import ConfigError
from holdfast.features.trackers.content import completions_of, metrics_of
from holdfast.features.trackers.environment import tracker_environment
from holdfast.files import python_module, read_end
from holdfast.metrics.sink import REWIND
from holdfast.text.escaping import escaped

MOST_WAITING_BYTES = 64 << 20
"""Rows that wait for one tracker; what comes on top of them is lost."""
_PROGRAM = "holdfast.features.trackers.process"
_LOOK_SECONDS = 0.01
"""Between two looks at trackers that are ending."""
_REAP_SECONDS = 0.5
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
    """The trackers of a run, on which the run does not depend; implements `TrackerProcesses` of `metrics/sink.py`."""

    def __init__(self, section: MetricsConfig, directory: Path, base: Path) -> None:
        self._tracked = set(section.track)
        self._trackers = [_Tracker(tracker, directory, base) for tracker in section.sinks]
        self._next_look = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a line of metrics."""
        if "metrics" in self._tracked or REWIND in metrics:
            self._send({"step": step, "metrics": metrics_of(metrics)})

    def completions(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the completions of a step."""
        if "completions" in self._tracked and samples:
            rows = completions_of(samples)
            self._send({"step": rows[0]["step"], "completions": rows})

    def _send(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        for tracker in self._trackers:
            tracker.send(line)

    def news(self) -> list[str]:
        """Return what became of trackers since the last call, each thing once."""
        if (seconds := time.monotonic()) < self._next_look:
            return []
        self._next_look = seconds + patience.current.tracker_look_seconds
        return [text for tracker in self._trackers if (text := tracker.news())]

    def close(self, status: str) -> list[str]:
        """End every process; return which trackers did not end well, and how many rows each lost.

        Args:
            status: `finished` or `failed`.
        """
        for tracker in self._trackers:
            tracker.ask_to_end(status)
        deadline = time.monotonic() + patience.current.tracker_close_seconds
        return [text for tracker in self._trackers if (text := tracker.end(deadline))]


class _Tracker:
    """One tracker's process, the rows that wait for it, and the count of those that it recorded."""

    def __init__(self, tracker: Tracker, directory: Path, base: Path) -> None:
        self._label = tracker.label
        self._arguments = [str(directory.absolute()), self._label, str(base.absolute())]
        self._log = directory / "logs" / f"tracker-{self._label}.log"
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued_bytes = self._piped_bytes = 0
        self._rows = self._queued = self._recorded = 0
        self._has_finished = self._is_silent = False
        self._heard_at = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble = ""
        """What went wrong and was not yet said."""
        folder = (directory / "trackers" / self._label).absolute()
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*python_module(_PROGRAM), "--of-run", *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    env=tracker_environment(tracker.kind, folder),
                    # Ctrl-C must not reach the tracker, which has to send the end of the run after the run has ended.
                    start_new_session=True,
                )
        except OSError as error:
            self._trouble = f"cannot be started: {error}"
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        threading.Thread(target=self._feed, args=[self._process], daemon=True).start()

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        """Write rows into the pipe, in a thread, since a tracker that hangs lets it fill; then wait for its end."""
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as pipe:  # it is gone
            while (line := self._queue.get()) is not None:
                rest = memoryview(line)
                while rest:  # a signal may cut a write short
                    rest = rest[os.write(pipe.fileno(), rest) :]
                self._piped_bytes += len(line)
        process.wait()

    def send(self, line: bytes) -> None:
        """Let a row wait for the tracker, or count it as lost."""
        self._hear()
        if self._queued == self._recorded:
            self._heard_at = time.monotonic()
        self._rows += 1
        is_full = self._queued_bytes - self._piped_bytes + len(line) > MOST_WAITING_BYTES
        if self._process is not None and not is_full:
            self._queued, self._queued_bytes = self._queued + 1, self._queued_bytes + len(line)
            self._queue.put(line)

    def _hear(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(BlockingIOError):
                if answers := os.read(self._process.stdout.fileno(), 1 << 16):
                    self._recorded += answers.count(b".")
                    self._has_finished |= b"!" in answers
                    self._heard_at, self._is_silent = time.monotonic(), False

    def news(self) -> str | None:
        """Return a sentence about trouble that was not yet told."""
        if self._process is not None:
            code = self._process.poll()
            self._hear()
            silent_seconds = time.monotonic() - self._heard_at
            if code is not None:
                self._let_go(f"ended with {_how(code)}{self._last_words()}")
            elif self._queued > self._recorded and silent_seconds > patience.current.tracker_silent_seconds:
                self._trouble = "" if self._is_silent else f"has been silent for {silent_seconds:.0f} s"
                self._is_silent = True
        trouble, self._trouble = self._trouble, ""
        then = "the run goes on without it" if self._process is None else "its rows wait"
        return f"warning: tracker {self._label} {trouble}; {then}" if trouble else None

    def _let_go(self, trouble: str) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process, self._trouble = None, trouble
        self._queue.put(None)

    def ask_to_end(self, status: str) -> None:
        """Send the run's end behind all rows."""
        self._queue.put(json.dumps({"status": status}).encode() + b"\n")
        self._queue.put(None)

    def end(self, deadline: float) -> str | None:
        """Wait until the deadline, then kill; return a sentence if rows were lost, or the tracker did not finish."""
        if (process := self._process) is not None:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                self._hear()
                time.sleep(_LOOK_SECONDS)
            if code is None:
                _kill_tree(process)
            self._hear()
            seconds = patience.current.tracker_close_seconds
            trouble = f"was ended {seconds:g} s after the run" if code is None else f"ended with {_how(code)}"
            self._let_go("" if self._has_finished else trouble + self._last_words())
        lost = self._rows - self._recorded
        if not lost and not self._trouble:
            return None
        trouble = f"{self._trouble}; " if self._trouble else ""
        again = shlex.join([*python_module(_PROGRAM), *self._arguments])
        return f"warning: tracker {self._label}: {trouble}{lost} of {self._rows} rows are lost. To send all: {again}"

    def _last_words(self) -> str:
        """Return the last line of the log, where Python names the error."""
        lines = [line.strip() for line in read_end(self._log, 4096).splitlines() if line.strip()]
        return f" ({escaped(lines[-1])[:300]}; see logs/{self._log.name})" if lines else ""


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
        process.wait(_REAP_SECONDS)
