"""The process of one tracker.

    python -m holdfast.features.trackers.process RUN_DIRECTORY LABEL [FOLDER_OF_THE_YAML]

Started by hand it sends all of a run that ended, with the environment that the run gave it. Started by a run
(`--of-run`) it takes rows from its standard input, answers each on its standard output, and ends within seconds of the
run whatever its library does.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from holdfast.config.earlier import todays_form
from holdfast.config.sections.metrics import MetricsConfig, UserTrackerConfig
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError
from holdfast.features.trackers.backends import KINDS
from holdfast.features.trackers.content import Backend, TrackedRun, completions_of, describe, metrics_of
from holdfast.features.trackers.environment import become_tracker, without_credentials
from holdfast.files import load_module
from holdfast.metrics.sink import METRICS, REWIND, SAMPLES, read_metrics

_LAST_SECONDS = 5
"""For a tracker's process to end after its run."""


def open_backend(run: TrackedRun, section: MetricsConfig, base: Path) -> Backend:
    """Return the tracker of a run that writes into the run's folder.

    Args:
        run: The facts about it; the folder has the tracker's label.
        section: Of its configuration.
        base: Folder of its YAML.
    """
    (tracker,) = (tracker for tracker in section.sinks if tracker.label == run.folder.name)
    if not isinstance(tracker, UserTrackerConfig):
        return KINDS[tracker.kind](run)
    file, _, name = tracker.path.rpartition(":")
    script = next(candidate for candidate in (base / file, Path(file)) if candidate.is_file()).resolve()
    backend: Backend = getattr(load_module(script, f"holdfast_tracker_{script.stem}"), name)(run, **tracker.kwargs)
    return backend


def record(
    directory: Path, label: str, base: Path, rows: Iterable[Mapping[str, Any]] | None, answer: Callable[[bytes], object]
) -> None:
    """Open a tracker, give it rows, and close it.

    Args:
        directory: The run's.
        label: The tracker's, as in `metrics.sinks`.
        base: Folder of the run's YAML.
        rows: Those that the run sends; None sends all of the run's files.
        answer: Takes a dot for each row, and an exclamation mark for the end.
    """
    section = _section_of(directory)
    if label not in [tracker.label for tracker in section.sinks]:
        raise ConfigError(f"{directory} has no tracker {label}. metrics.sinks of its configuration names them.")
    tracked: set[str] = set(section.track)
    folder = directory / "tensorboard" if label == "tensorboard" else directory / "trackers" / label
    for needed in (folder, directory / "trackers"):
        needed.mkdir(parents=True, exist_ok=True)
    with (directory / "trackers" / f".{label}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a start that was killed a moment ago may still write
        backend, status = open_backend(describe(directory, folder, tracked), section, base), "killed"
        for row in rows or _rows_of(directory, tracked):
            match row:
                case {"status": status}:
                    continue
                case {"step": step, "metrics": metrics}:
                    backend.write(step, metrics)
                case {"step": step, "completions": completions} if hasattr(backend, "completions"):
                    backend.completions(step, completions)
            answer(b".")
        backend.close(status)
        answer(b"!")


def _section_of(directory: Path) -> MetricsConfig:
    values = todays_form(parse_file(directory / "config.resolved.yaml").values)
    return MetricsConfig.model_validate(values["metrics"])


def _rows_of(directory: Path, tracked: set[str]) -> Iterator[Mapping[str, Any]]:
    """Yield all of a run that ended, behind a rewind that makes void what its tracker has."""
    yield {"step": 0, "metrics": {REWIND: 0.0}}
    for line in _effective_lines(directory / METRICS) if "metrics" in tracked else ():
        yield {"step": line["step"], "metrics": metrics_of(line)}
    samples = _effective_lines(directory / SAMPLES) if "completions" in tracked else ()
    for step, group in groupby(samples, key=lambda sample: sample["step"]):
        yield {"step": step, "completions": completions_of(list(group))}
    yield {"status": "finished"}


def _effective_lines(path: Path) -> list[dict[str, Any]]:
    lines = read_metrics(path) if path.exists() else []
    return [line for line in lines if "step" in line and "event" not in line]


def _end_with_run(pipe: int) -> None:
    """End this process a few seconds after the run closed the pipe or died, also where the tracker's library hangs."""
    looks = select.poll()
    looks.register(pipe, 0)  # that it was closed is seen although rows are left

    def wait() -> None:
        looks.poll()
        signal.alarm(_LAST_SECONDS)

    threading.Thread(target=wait, daemon=True).start()


def _take_environment(directory: Path, label: str) -> None:
    """Give this process the environment that a run gives its tracker, before a library reads it."""
    for tracker in _section_of(directory).sinks:
        if tracker.label == label:
            become_tracker(tracker.kind, directory / "trackers" / label)


def _end_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


def _tell_of_thread(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_type is not SystemExit:
        text = "".join(traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback))
        sys.stderr.write(without_credentials(text))


def main(arguments: Sequence[str]) -> int:
    """Record what a run sends, or all of one that ended."""
    atexit.register(_end_children)  # the first one is called last: a library may still need its processes
    threading.excepthook = _tell_of_thread
    of_run = arguments[0] == "--of-run"
    directory, label, *rest = arguments[1:] if of_run else arguments
    place = Path(directory).absolute()
    rows, answers = None, -1
    if of_run:
        pipe, answers = os.dup(0), os.dup(1)  # which no process of the library inherits
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what libraries print belongs in the log
        _end_with_run(pipe)
        # A launcher sends it to all processes of a run at once. A handler, unlike SIG_IGN, is not inherited.
        signal.signal(signal.SIGTERM, lambda *_: None)
        rows = (json.loads(line) for line in os.fdopen(pipe, "rb") if line.endswith(b"\n"))  # a kill tears the last

    def answer(byte: bytes) -> None:
        with suppress(OSError):  # there is no run, or it has died
            os.write(answers, byte)

    try:
        if not of_run:
            _take_environment(place, label)
        record(place, label, Path(rest[0] if rest else "."), rows, answer)
    except (Exception, SystemExit):  # noqa: BLE001  of a library or a user's class
        sys.stderr.write(without_credentials(traceback.format_exc()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
