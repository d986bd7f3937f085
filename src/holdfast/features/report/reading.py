"""Reads a run's directory into one record. The run may still go on, and its files may be incomplete or damaged.

What cannot be read is left out and named in `notes`; nothing is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import UserError
from holdfast.features.report.checkpoints import CheckpointLine, checkpoint_lines
from holdfast.features.report.curves import Curves, LineReader, finite_number
from holdfast.features.report.formats import counted
from holdfast.features.report.samples import Samples, last_samples, read_samples
from holdfast.features.report.settings import Parent, end_of, flat_public, read_configuration, read_parent
from holdfast.features.report.story import Mark, marks_of
from holdfast.files import read_json, read_text
from holdfast.metrics.progress import End
from holdfast.metrics.sink import METRICS, SAMPLES
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened
from holdfast.training.directory import EVENTS, IDENTITY, MEMORY, PLAN
from holdfast.training.run_state import RunState, json_lines, state_of

VERSIONS = "versions.json"
MEASURED_MEMORY = ("memory/peak_gib", "memory/resident_gib")
"""Metrics in GiB, of which the first that a run has counts."""
_FOLLOWED_BYTES = 8 << 20
"""Of a log that are read of a run that is followed: some thousand steps."""


class PlannedPeaks(NamedTuple):
    """The planned peaks in plan.json that measurements are shown beside; empty where there is no plan."""

    bytes_: float | None = None
    """Peak memory of a rank's device, of the host where the plan is of CPUs."""
    device: str = ""
    """Type of the ranks' devices: cuda or cpu."""
    phases: Mapping[str, float] = {}
    """Phase of the run's clock -> bytes"""


class RankStatus(NamedTuple):
    """The last phase, step and sign of life that a rank wrote to the launch directory."""

    rank: int
    phase: str
    step: int | None
    age: float
    """Seconds since the rank last wrote a file."""


@dataclass
class RunRecord:
    """Everything that a page, a comparison or a terminal shows of one run's directory."""

    directory: Path
    name: str
    verb: str
    run_id: str
    end: End
    """Steps of the whole run, where the configuration says so."""
    configuration: Mapping[str, str]
    """Flat, without what could be secret."""
    parent: Parent | None
    versions: Mapping[str, str]
    planned: PlannedPeaks
    curves: Curves = field(default_factory=Curves)
    state: RunState = RunState("failed", "")
    events: Sequence[Mapping[str, Any]] = ()
    marks: Sequence[Mark] = ()
    samples: Samples = field(default_factory=Samples)
    checkpoints: Sequence[CheckpointLine] = ()
    ranks: Sequence[RankStatus] = ()
    """Of a run that is followed."""
    notes: Sequence[str] = ()
    """Sentences on the files that could not be read."""

    @property
    def total(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        return self.curves.steps_at(self.end)

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """The events of its starts."""
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def measured_phases(self) -> dict[str, float]:
        """What each phase took of a device like the plan's on rank 0, of all steps so far, in bytes."""
        notes = [event for event in self.events if event.get("event") == MEMORY]
        if not notes or notes[-1].get("device") != self.planned.device:
            return {}
        start = _bytes_by_name(notes[-1]).get("start", 0.0) if self.planned.device == "cpu" else 0.0
        return {phase: max(0.0, peak - start) for phase, peak in _bytes_by_name(notes[-1].get("peaks")).items()}

    @property
    def measured_bytes(self) -> float | None:
        """The most memory that rank 0 noted."""
        for name in MEASURED_MEMORY:
            column = self.curves.columns.get(name)
            values = [value for value in column.values if math.isfinite(value)] if column else []
            if values:
                return max(values) * 2**30
        return None


class RunReader:
    """Reads a run's directory, and again what was appended since.

    Args:
        directory: Of the run.
        follows: Whether the run goes on: of a long log and of completions the ends are read, and what the ranks do. A
            file that cannot be read is then an error in the place of a note.

    Raises:
        UserError: It is not the directory of a run.
    """

    def __init__(self, directory: Path, *, follows: bool = False) -> None:
        check_is_run(directory)
        self._directory, self._follows = directory, follows
        self._notes: list[str] = []
        self._lines = LineReader(directory / METRICS, _FOLLOWED_BYTES if follows else None)
        identity, versions = self._mapping(IDENTITY), self._mapping(VERSIONS)
        configuration, note = read_configuration(directory)
        section = configuration.get("checkpoint")
        self._storage = section.get("storage") if isinstance(section, Mapping) else None
        self._fixed_notes = [*self._notes, *[note] * bool(note)]
        self._record = RunRecord(
            directory=directory,
            name=escaped(directory.absolute().name),
            verb=escaped(str(identity.get("verb", "run"))),
            run_id=escaped(str(identity.get("run_id", ""))),
            end=end_of(configuration),
            configuration=flat_public(configuration),
            parent=read_parent(directory, identity),
            versions={escaped(str(name)): escaped(str(version)) for name, version in versions.items()},
            planned=_planned(directory / PLAN),
        )

    def update(self) -> RunRecord:
        """Return the record of what is there by now.

        Raises:
            OSError: A file of a run that is followed cannot be read.
        """
        directory, record = self._directory, self._record
        self._notes = []
        curves = record.curves
        with self._noting(METRICS):
            for _, line in self._lines.new(to_end=not self._follows):
                curves.add(line)
        self._notes += _curve_notes(curves, self._lines)
        with self._noting(EVENTS), suppress(FileNotFoundError):
            record.events = json_lines(read_text(directory / EVENTS))
        record.marks = marks_of(curves, record.events)
        storage = self._storage if isinstance(self._storage, str) else None
        record.checkpoints, note = checkpoint_lines(directory, record.events, storage)
        with self._noting(SAMPLES):
            record.samples = last_samples(directory) if self._follows else read_samples(directory)
        if unread := record.samples.unread:
            self._notes.append(f"{SAMPLES} has {counted(unread, 'line')} that could not be read.")
        record.state = RunState("failed", "how it stands cannot be read")
        with self._noting("The lease of the run"):
            record.state = state_of(directory, record.events, curves.last)
        record.ranks = rank_statuses(directory) if self._follows else ()
        record.notes = [*self._fixed_notes, *self._notes, *[note] * bool(note)]
        return record

    def _mapping(self, file: str) -> dict[str, Any]:
        try:
            values = read_json(self._directory / file)
            if isinstance(values, dict):
                return values
            reason = "holds something else than Holdfast writes"
        except FileNotFoundError:
            reason = "is missing"
        except (OSError, ValueError) as error:
            reason = f"cannot be read ({shortened(escaped(str(error)), 200)})"
        self._notes.append(f"{file} {reason}.")
        return {}

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note what cannot be read; of a run that is followed, raise it."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._follows:
                raise
            self._notes.append(f"{what} cannot be read: {shortened(escaped(str(error)), 200)}.")


def read_run(directory: Path) -> RunRecord:
    """Return what a run directory says.

    Raises:
        UserError: It is not the directory of a run.
    """
    return RunReader(directory).update()


def check_is_run(directory: Path) -> None:
    """Refuse what is not the directory of a run.

    Raises:
        UserError: With the paths that a run has.
    """
    try:
        if (directory / IDENTITY).exists() or (directory / METRICS).exists():
            return
        names = "it holds no run.json and no metrics.jsonl" if directory.is_dir() else "there is no such directory"
    except OSError as error:
        names = error.strerror or str(error)
    raise UserError(
        f"{directory} is not the directory of a run: {names}. `holdfast runs ls DIR` lists the runs in a directory."
    )


def _curve_notes(curves: Curves, lines: LineReader) -> Iterator[str]:
    if curves.last is None:
        yield f"{METRICS} has no line of a step yet."
    if curves.unread == 1 and lines.is_torn:
        yield f"The last line of {METRICS} is torn, as after a kill, and is left out."
    elif curves.unread:
        yield f"{METRICS} has {counted(curves.unread, 'line')} that could not be read."
    for name, column in curves.columns.items():
        if steps := column.not_finite:
            step_list = ", ".join(map(str, steps[:8])) + (" and others" if len(steps) > 8 else "")
            yield f"{escaped(name)} was no finite number at {counted(len(steps), 'step')}: {step_list}."


def _planned(path: Path) -> PlannedPeaks:
    try:
        values = read_json(path)
        peak, device = values["peak_bytes"], "cpu" if values["device"] is None else "cuda"
        phases = _bytes_by_name(values["clock_phases"])
    except (OSError, ValueError, KeyError, TypeError):
        return PlannedPeaks()
    return PlannedPeaks(float(peak), device, phases) if _is_size(peak) else PlannedPeaks()


def _bytes_by_name(values: object) -> dict[str, float]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {escaped(str(name)): float(value) for name, value in pairs if _is_size(value)}


def _is_size(value: object) -> bool:
    return (finite_number(value) or 0) > 0


def rank_statuses(directory: Path) -> list[RankStatus]:
    """Return what the ranks of a run's own launcher left beside its directory; nothing under torchrun."""
    run_path = directory.absolute()
    phases: dict[int, str] = {}
    steps: dict[int, int] = {}
    times: dict[int, float] = {}
    for path in run_path.parent.glob(f".{run_path.name}.launch-*/*-rank-*"):
        kind, _, number = path.name.partition("-rank-")
        if kind not in {"phase", "beat"} or not number.isdecimal():
            continue
        try:
            text, written = path.read_text(errors="replace")[:200], path.stat().st_mtime
        except OSError:
            continue
        rank, fields = int(number), text.split("|")
        times[rank] = max(written, times.get(rank, 0.0))
        if kind == "phase":
            phases[rank] = escaped(text.strip())
        elif len(fields) >= 3 and fields[1].isdecimal():
            steps[rank] = int(fields[1])
    now = time.time()
    return [
        RankStatus(rank, phases.get(rank, ""), steps.get(rank), max(0.0, now - written))
        for rank, written in sorted(times.items())
    ]
