"""Follows a run while it goes on, by the lines appended to its logs and the status files of its ranks.

Each read is cheap: of a long log only the end is read at first, and unchanged files are not read again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.features.report.checkpoints import CheckpointLine, checkpoint_lines
from holdfast.features.report.curves import Curves, LineReader
from holdfast.features.report.reading import check_is_run
from holdfast.features.report.samples import ShownSample, sample_of
from holdfast.features.report.settings import end_of, read_configuration
from holdfast.features.report.story import Mark, marks_of
from holdfast.files import RegularFile, parse_json, read_json, read_text
from holdfast.metrics.progress import End
from holdfast.metrics.sink import METRICS, SAMPLES
from holdfast.text.escaping import escaped
from holdfast.training.directory import EVENTS, IDENTITY
from holdfast.training.run_state import RunState, json_lines, newest_lease, state_of

FIRST_BYTES = 8 << 20
"""Of a log that are read at the first look: some thousand steps."""
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class RankStatus:
    """The last phase, step and sign of life that a rank wrote to the launch directory."""

    rank: int
    phase: str
    step: int | None
    age: float
    """Seconds since the rank last wrote a file."""


@dataclass
class RunStatus:
    """The state of a run at the last look."""

    name: str
    verb: str
    end: End
    state: RunState
    curves: Curves
    events: Sequence[Mapping[str, Any]] = ()
    marks: Sequence[Mark] = ()
    checkpoints: Sequence[CheckpointLine] = ()
    samples: Sequence[ShownSample] = ()
    ranks: Sequence[RankStatus] = ()
    started: float | None = None
    """Time of the last start, where the run noted it."""
    first_step: int = 0
    """The step that the last start began with."""
    active: float | None = None
    """Time at which the log last grew."""

    @property
    def total(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        return self.curves.steps_at(self.end)


class Follower:
    """Reads what a run has written since the last read.

    Args:
        directory: Directory of the run.

    Raises:
        UserError: The directory is not that of a run.
    """

    def __init__(self, directory: Path) -> None:
        check_is_run(directory)
        self._directory = directory
        self._curves = Curves()
        self._lines = LineReader(directory / METRICS, last_bytes=FIRST_BYTES)
        self._signatures: tuple[object, ...] = ()
        self._storage: str | None = None
        self.status = RunStatus(escaped(directory.absolute().name), "", End(), RunState("failed", ""), self._curves)
        self._identify()

    def _identify(self) -> None:
        try:
            self.status.verb = escaped(str(read_json(self._directory / IDENTITY)["verb"]))
        except (OSError, ValueError, KeyError, TypeError):
            self.status.verb = "run"
        configuration, _ = read_configuration(self._directory)
        section = configuration.get("checkpoint")
        self.status.end = end_of(configuration)
        storage = section.get("storage") if isinstance(section, Mapping) else None
        self._storage = storage if isinstance(storage, str) else None

    def has_changed(self) -> bool:
        """Return whether a file of the run grew since this was asked last; reads none."""
        paths = [self._directory / name for name in (METRICS, EVENTS, SAMPLES, IDENTITY)]
        signatures = tuple(_signature(path) for path in (*paths, newest_lease(self._directory)) if path is not None)
        changed, self._signatures = signatures != self._signatures, signatures
        return changed

    def update(self) -> RunStatus:
        """Read what is new and return what is known.

        Raises:
            OSError: A file cannot be read any more.
        """
        directory, status = self._directory, self.status
        for _, line in self._lines.new():
            self._curves.add(line)
        signature = _signature(directory / EVENTS)
        status.events = json_lines(read_text(directory / EVENTS)) if signature else []
        status.marks = marks_of(self._curves, status.events)
        status.checkpoints, _ = checkpoint_lines(directory, status.events, self._storage)
        status.samples = last_samples(directory / SAMPLES)
        status.state = state_of(directory, status.events, self._curves.last)
        status.ranks = rank_statuses(directory)
        start: Mapping[str, Any] = next(
            (event for event in reversed(status.events) if event.get("event") == "start"), {}
        )
        status.started = start["time"] if isinstance(start.get("time"), int | float) else None
        status.first_step = start["step"] if isinstance(start.get("step"), int) else 0
        metrics = _signature(directory / METRICS)
        status.active = metrics[0] / 1e9 if metrics else None
        return status


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def last_samples(path: Path) -> list[ShownSample]:
    """Return the completions at the end of samples.jsonl that are of its last step."""
    if not path.exists():
        return []
    with RegularFile(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _SAMPLE_BYTES))
        _, _, text = (b"\n" + file.read() if size <= _SAMPLE_BYTES else file.read()).partition(b"\n")
    lines = (sample_of(_parsed(line), -1) for line in text.split(b"\n") if line.strip())
    samples = [sample for sample in lines if sample is not None]
    return [sample for sample in samples if sample.step == samples[-1].step]


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


@dataclass
class _RankNotes:
    phase: str = ""
    step: int | None = None
    times: list[float] = field(default_factory=list)


def rank_statuses(directory: Path) -> list[RankStatus]:
    """Return what the ranks of a run's own launcher left beside its directory; nothing under torchrun."""
    run_path = directory.absolute()
    notes: dict[int, _RankNotes] = {}
    for folder in run_path.parent.glob(f".{run_path.name}.launch-*"):
        for path in folder.glob("*-rank-*"):
            kind, _, number = path.name.partition("-rank-")
            if kind not in {"phase", "beat"} or not number.isdecimal():
                continue
            try:
                text, written = path.read_text(errors="replace")[:200], path.stat().st_mtime
            except OSError:
                continue
            note = notes.setdefault(int(number), _RankNotes())
            note.times.append(written)
            fields = text.split("|")
            if kind == "phase":
                note.phase = text.strip()
            elif len(fields) >= 3 and fields[1].isdecimal():
                note.step = int(fields[1])
    current_time = time.time()
    return [
        RankStatus(rank, escaped(rank_note.phase), rank_note.step, max(0.0, current_time - max(rank_note.times)))
        for rank, rank_note in sorted(notes.items())
    ]
