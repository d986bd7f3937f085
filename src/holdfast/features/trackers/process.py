"""The process of one tracker: it reads the files that the run writes, and passes on what is allowed.

    python -m holdfast.features.trackers.process RUN_DIRECTORY LABEL [FOLDER_OF_THE_YAML]

Started by hand it sends what a tracker still lacks of a run that ended. Started by a run (`--of-run`) it follows the
run's files until its standard input ends, says that it lives on its standard output, and ends within seconds of the
run whatever its library does. It reads on where an earlier process of the same tracker stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from holdfast.config.earlier import todays_form
from holdfast.config.sections.metrics import MetricsConfig, UserTrackerConfig
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError
from holdfast.features.trackers import backends
from holdfast.features.trackers.backends import REWIND
from holdfast.features.trackers.content import MOST_ROWS, Backend, completion_row, describe
from holdfast.files import open_regular, parse_json, read_json
from holdfast.metrics.sink import METRICS, SAMPLES

_KINDS: Mapping[str, Callable[..., Backend]] = {
    "csv": backends.CsvTracker,
    "tensorboard": backends.TensorBoardTracker,
    "wandb": backends.WandbTracker,
    "mlflow": backends.MlflowTracker,
    "trackio": backends.TrackioTracker,
    "swanlab": backends.SwanlabTracker,
}
_TRACKER_READ_SECONDS = 0.5
"""Between two looks of a tracker at what the run wrote."""
_TRACKER_GROUP_SECONDS = 2.0
"""Completions of a step count as complete when those of a later step follow, or none came for so long."""
_TRACKER_NOTE_SECONDS = 1.0
"""Between two notes of what a tracker has sent."""
_TRACKER_LAST_SECONDS = 5.0
"""For a tracker process to end after its run has died."""


class RunEnd:
    """The end of the run, as the run reports it on standard input."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.status = "killed"

    def watch(self) -> None:
        """Wait in a thread for the run to say how it ended, or to die."""
        # A daemon thread: it blocks in a read of standard input, and must not keep a finished process alive.
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        content = b""
        while piece := os.read(0, 100):  # sys.stdin has a lock, on which the interpreter aborts at its end
            content += piece
        self.status = content.decode().strip() or self.status
        # The kernel keeps this promise also where a library holds the interpreter's lock for ever.
        signal.alarm(int(_TRACKER_LAST_SECONDS))
        self.ended.set()


class TrackerFeed:
    """Moves what is new from the run's files into the tracker."""

    def __init__(self, directory: Path, backend: Backend, cursor: Path, tracked: set[str]) -> None:
        offsets = TrackerCursor.read(cursor)
        self._backend, self._tracked = backend, tracked
        self._cursor = TrackerCursor(cursor, backend.settle_seconds)
        self._metrics = JsonLinesReader(directory / METRICS, offsets.get(METRICS, 0))
        self._samples = JsonLinesReader(directory / SAMPLES, offsets.get(SAMPLES, 0))
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._waiting_since = math.inf

    def move(self, *, to_the_end: bool) -> bool:
        """Send new lines and samples to the backend; return whether there were any."""
        lines = self._metrics.take()
        for _, line in lines:
            self._send_line(line)
        samples = self._samples.take()
        if samples:
            self._waiting += samples
            self._waiting_since = time.monotonic()
        self._send_completions(
            includes_last=to_the_end or time.monotonic() - self._waiting_since > _TRACKER_GROUP_SECONDS
        )
        if lines or samples:
            first_waiting = self._waiting[0][0] if self._waiting else self._samples.offset
            self._cursor.sent({METRICS: self._metrics.offset, SAMPLES: first_waiting})
        self._cursor.note()
        return bool(lines or samples)

    def close(self, status: str) -> None:
        """Close the tracker; what it was sent is settled then."""
        self._backend.close(status)
        self._cursor.sent({METRICS: self._metrics.offset, SAMPLES: self._samples.offset})
        self._cursor.note(all_of_it=True)

    def _send_line(self, line: Mapping[str, Any]) -> None:
        if line.get("event") == "rewind":
            self._backend.write(int(line["to"]), {REWIND: float(line["to"])})
        elif "metrics" in self._tracked and "step" in line:
            # What JSON cannot hold is null there.
            numbers = {name: math.nan if value is None else value for name, value in line.items() if name != "step"}
            accepted = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
            if accepted:
                self._backend.write(int(line["step"]), accepted)

    def _send_completions(self, *, includes_last: bool) -> None:
        steps = [
            (step, list(group))
            for step, group in groupby(self._waiting, key=lambda sample_of_step: sample_of_step[1].get("step"))
        ]
        for step, group in steps if includes_last else steps[:-1]:
            rows = [completion_row(sample) for _, sample in group[:MOST_ROWS] if step is not None]
            if rows and "completions" in self._tracked:
                self._backend.completions(int(rows[0]["step"]), rows)
            del self._waiting[: len(group)]


def is_complete(directory: Path, cursor: Path) -> bool:
    """Return whether a tracker lacks nothing: some libraries begin a new folder whenever they are opened."""
    offsets = TrackerCursor.read(cursor)
    files = [JsonLinesReader(directory / name, offsets.get(name, 0)) for name in (METRICS, SAMPLES)]
    return bool(offsets) and not any(file.take() for file in files)


def open_backend(directory: Path, label: str, base: Path) -> tuple[Backend, set[str]]:
    """Return the tracker of a run that has the label, and what it may be sent."""
    values = todays_form(parse_file(directory / "config.resolved.yaml").values)
    section = MetricsConfig.model_validate(values["metrics"])
    matching = [tracker for tracker in section.sinks if tracker.label == label]
    if not matching:
        raise ConfigError(f"{directory} has no tracker {label}. metrics.sinks of its configuration names them.")
    tracker = matching[0]
    tracked: set[str] = set(section.track)
    folder = directory / "tensorboard" if label == "tensorboard" else directory / "trackers" / label
    folder.mkdir(parents=True, exist_ok=True)
    run = describe(directory, folder, tracked)
    if isinstance(tracker, UserTrackerConfig):
        file, _, name = tracker.path.rpartition(":")
        script = next(candidate for candidate in (base / file, Path(file)) if candidate.is_file())
        return backends.UserTracker(run, script.resolve(), name, tracker.kwargs), tracked
    return _KINDS[tracker.kind](run), tracked


def follow(directory: Path, label: str, base: Path, run: RunEnd, beat: Callable[[], None]) -> None:
    """Mirror a run until it ends."""
    folder = directory / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{label}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a start that was killed a moment ago may still write
        beat()
        cursor = folder / f".{label}.json"
        if run.ended.is_set() and is_complete(directory, cursor):
            return
        backend, tracked = open_backend(directory, label, base)
        feed = TrackerFeed(directory, backend, cursor, tracked)
        while True:
            beat()
            ended = run.ended.is_set()  # before the look: what the run wrote before its end is sent
            moved = feed.move(to_the_end=ended)
            if ended and not moved:
                break
            if not moved:
                run.ended.wait(_TRACKER_READ_SECONDS)
        feed.close(run.status)


def main(arguments: Sequence[str]) -> int:
    """Follow a run, or catch up with one that ended."""
    of_run = "--of-run" in arguments
    directory, label, *rest = [argument for argument in arguments if argument != "--of-run"]
    run = RunEnd()
    if of_run:
        pipe = os.dup(sys.stdout.fileno())
        os.set_blocking(pipe, False)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print belongs in the log
        run.watch()
    else:
        run.status = "finished"
        run.ended.set()

    def beat() -> None:
        if of_run:
            with contextlib.suppress(OSError):  # full, or nobody reads: then nobody waits for it either
                os.write(pipe, b".")

    follow(Path(directory).absolute(), label, Path(rest[0] if rest else "."), run, beat)
    return 0


_CHUNK = 1 << 20


class JsonLinesReader:
    """The whole lines of a file that grows, without those that a resume went back behind.

    A run writes into metrics.jsonl where it goes back to before it starts its trackers, so all of that is there when
    this one begins; in samples.jsonl that comes with the first sample, and void completions may be sent first. Some
    libraries keep the first value of a step that one process gives them, and must not see what is void.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset if self._begins_a_line(offset) else 0
        """Bytes taken; a file that lost what was taken before, in a power cut, is taken from its beginning."""
        self._rewinds: list[tuple[int, int]] = []
        """Where each is in the file, and the step it goes back to."""
        first = self.offset
        while lines := self.take():
            self._rewinds += [
                (line_offset, int(line["to"])) for line_offset, line in lines if line.get("event") == "rewind"
            ]
        self.offset = first

    def _begins_a_line(self, offset: int) -> bool:
        if offset == 0:
            return True
        try:
            with open_regular(self._path) as file:
                file.seek(offset - 1)
                return file.read(1) == b"\n"
        except OSError:
            return False

    def size(self) -> int:
        """Return the present size of the file in bytes."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the next lines, each with the offset at which it begins; none where there are none yet."""
        while content := self._read():
            lines = []
            for line in content.splitlines(keepends=True):
                with contextlib.suppress(ValueError):  # not a line of Holdfast's
                    lines.append((self.offset, parse_json(line)))
                self.offset += len(line)
            if counting := [(line_offset, line) for line_offset, line in lines if not self._is_void(line_offset, line)]:
                return counting
        return []

    def _is_void(self, offset: int, line: Mapping[str, Any]) -> bool:
        return any(offset < later and line.get("step", 0) > step for later, step in self._rewinds)

    def _read(self) -> bytes:
        """Return the next whole lines as they are."""
        data = b""
        if self.size() > self.offset:
            with open_regular(self._path) as file:
                file.seek(self.offset)
                while b"\n" not in data and (piece := file.read(_CHUNK)):
                    data += piece
        return data[: data.rfind(b"\n") + 1]


class TrackerCursor:
    """How far a tracker has come, in a file: what was sent so long ago that it stands where a kill cannot take it.

    What came later is sent again by the next process. That is harmless: the last value of a step counts.
    """

    def __init__(self, path: Path, settle_seconds: float) -> None:
        self._path, self._settle_seconds = path, settle_seconds
        self._sent: deque[tuple[float, dict[str, int]]] = deque()
        self._noted_at = 0.0

    @staticmethod
    def read(path: Path) -> Mapping[str, int]:
        """Return the offsets by file; none where there is no cursor, or a kill tore it."""
        try:
            return {str(name): int(offset) for name, offset in read_json(path).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def sent(self, offsets: Mapping[str, int]) -> None:
        """Take what was sent up to now."""
        self._sent.append((time.monotonic(), dict(offsets)))

    def note(self, *, all_of_it: bool = False) -> None:
        """Write what has settled; everything where the tracker was closed."""
        seconds, settled = time.monotonic(), None
        if not all_of_it and seconds - self._noted_at < _TRACKER_NOTE_SECONDS:
            return
        while self._sent and (all_of_it or seconds - self._sent[0][0] >= self._settle_seconds):
            settled = self._sent.popleft()[1]
        if settled is not None:
            self._noted_at = seconds
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(settled), encoding="utf-8")
            temporary.replace(self._path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
