"""Reads a run's directory into one record. The run may still go on, and its files may be incomplete or damaged.

What cannot be read is left out and named in `notes`; nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import UserError
from holdfast.features.report.checkpoints import CheckpointLine, checkpoint_lines
from holdfast.features.report.curves import Curves, LineReader, do_nothing, finite_number
from holdfast.features.report.samples import Samples, read_samples
from holdfast.features.report.settings import Parent, end_of, flat_public, read_configuration, read_parent
from holdfast.features.report.story import Mark, marks_of
from holdfast.files import NotRegular, read_json, read_text
from holdfast.metrics.progress import End
from holdfast.metrics.sink import METRICS, SAMPLES
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened
from holdfast.training.directory import EVENTS, IDENTITY, MEMORY, PLAN
from holdfast.training.run_state import RunState, json_lines, state_of

VERSIONS = "versions.json"
MEASURED_MEMORY = ("memory/peak_gib", "memory/resident_gib")
"""Metrics in GiB, of which the first that a run has counts."""


class PlannedPeaks(NamedTuple):
    """The planned peaks in plan.json that measurements are shown beside; empty where there is no plan."""

    bytes_: float | None = None
    """Peak memory of a rank's device, of the host where the plan is of CPUs."""
    device: str = ""
    """Type of the ranks' devices: cuda or cpu."""
    phases: Mapping[str, float] = {}
    """Phase of the run's clock -> bytes"""


@dataclass(frozen=True)
class RunRecord:
    """Everything that a report shows of one run's directory."""

    directory: Path
    name: str
    verb: str
    run_id: str
    state: RunState
    end: End
    """Steps of the whole run, where the configuration says so."""
    curves: Curves
    events: Sequence[Mapping[str, Any]]
    marks: Sequence[Mark]
    samples: Samples
    checkpoints: Sequence[CheckpointLine]
    configuration: Mapping[str, str]
    """Flat, without what could be secret."""
    parent: Parent | None
    versions: Mapping[str, str]
    planned: PlannedPeaks
    notes: list[str] = field(default_factory=list)
    """Sentences on the files that could not be read."""

    @property
    def total(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        return self.curves.steps_at(self.end)

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


def read_run(directory: Path, between: Callable[[], None] = do_nothing) -> RunRecord:
    """Return what a run directory says.

    Args:
        directory: Of the run.
        between: Called now and then; what it raises ends the reading.

    Raises:
        UserError: It is not the directory of a run.
    """
    check_is_run(directory)
    notes: list[str] = []
    identity = _mapping(directory / IDENTITY, notes)
    curves = _curves(directory, notes, between)
    events = _events(directory, notes)
    configuration, note = read_configuration(directory)
    notes += [note] * bool(note)
    checkpoint_section = configuration.get("checkpoint")
    storage = checkpoint_section.get("storage") if isinstance(checkpoint_section, Mapping) else None
    checkpoints, note = checkpoint_lines(directory, events, storage if isinstance(storage, str) else None)
    notes += [note] * bool(note)
    return RunRecord(
        directory=directory,
        name=escaped(directory.absolute().name),
        verb=escaped(str(identity.get("verb", "run"))),
        run_id=escaped(str(identity.get("run_id", ""))),
        state=_state(directory, events, curves.last),
        end=end_of(configuration),
        curves=curves,
        events=events,
        marks=marks_of(curves, events),
        samples=_samples(directory, notes, between),
        checkpoints=checkpoints,
        configuration=flat_public(configuration),
        parent=read_parent(directory, identity),
        versions={escaped(str(k)): escaped(str(v)) for k, v in _mapping(directory / VERSIONS, notes).items()},
        planned=_planned(directory / PLAN),
        notes=notes,
    )


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


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        values = read_json(path)
        if isinstance(values, dict):
            return values
        reason = "holds something else than Holdfast writes"
    except FileNotFoundError:
        reason = "is missing"
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({shortened(escaped(str(error)), 200)})"
    notes.append(f"{path.name} {reason}.")
    return {}


def _curves(directory: Path, notes: list[str], between: Callable[[], None]) -> Curves:
    curves, reader = Curves(), LineReader(directory / METRICS)
    try:
        for _, line in reader.new(between, to_end=True):
            curves.add(line)
    except (NotRegular, PermissionError) as error:
        notes.append(f"{METRICS} cannot be read: {escaped(str(error))}.")
    if curves.last is None:
        notes.append(f"{METRICS} has no line of a step yet.")
    if curves.unread == 1 and reader.is_torn:
        notes.append(f"The last line of {METRICS} is torn, as after a kill, and is left out.")
    elif curves.unread:
        notes.append(f"{curves.unread} lines of {METRICS} could not be read and are left out.")
    for name, column in curves.columns.items():
        if steps := column.not_finite:
            step_list = ", ".join(map(str, steps[:8])) + (" and others" if len(steps) > 8 else "")
            plural = "s" * (len(steps) != 1)
            notes.append(f"{escaped(name)} was no finite number at {len(steps)} step{plural}: {step_list}.")
    return curves


def _events(directory: Path, notes: list[str]) -> list[dict[str, Any]]:
    path = directory / EVENTS
    try:
        return json_lines(read_text(path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"{EVENTS} cannot be read: {shortened(escaped(str(error)), 200)}.")
        return []


def _samples(directory: Path, notes: list[str], between: Callable[[], None]) -> Samples:
    try:
        samples = read_samples(directory, between)
    except (NotRegular, PermissionError) as error:
        notes.append(f"{SAMPLES} cannot be read: {escaped(str(error))}.")
        return Samples()
    if samples.unread:
        plural = "s" * (samples.unread != 1)
        notes.append(
            f"{samples.unread} line{plural} of {SAMPLES} could not be read and {'are' if plural else 'is'} left out."
        )
    return samples


def _state(directory: Path, events: Sequence[Mapping[str, Any]], step: int | None) -> RunState:
    try:
        return state_of(directory, events, step)
    except (OSError, ValueError) as error:
        return RunState("failed", f"how it stands cannot be read: {shortened(escaped(str(error)), 200)}")


def _planned(path: Path) -> PlannedPeaks:
    try:
        values = read_json(path)
        peak, device = values["peak_bytes"], "cpu" if values["device"] is None else "cuda"
        phases = _bytes_by_name(values["clock_phases"])
    except (OSError, ValueError, KeyError, TypeError):
        return PlannedPeaks()
    return PlannedPeaks(float(peak), device, phases) if _is_number(peak) else PlannedPeaks()


def _bytes_by_name(values: object) -> dict[str, float]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {escaped(str(name)): float(value) for name, value in pairs if _is_number(value)}


def _is_number(value: object) -> bool:
    return (finite_number(value) or 0) > 0
