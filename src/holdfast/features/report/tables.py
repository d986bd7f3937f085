"""Sums runs up in words and tables, which the page's template shows without a script."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.features.report.curves import finite_number
from holdfast.features.report.formats import NOT_THERE, counted, digits, moment, seconds_words
from holdfast.features.report.metrics import EVALUATING, EVALUATION, TIMING, evaluations_of, leading, metric_label
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.settings import setting_differences
from holdfast.features.report.story import Mark
from holdfast.files import size_words

_FIRST_SENTENCES, _LAST_SENTENCES = 100, 400
Row = Sequence[str | float]
"""Cells: text, or a share that is shown as a bar too."""


class Table(NamedTuple):
    """A table of the page."""

    caption: str
    """For those who hear the page."""
    heads: Sequence[str]
    rows: Sequence[Row]
    numbers: Sequence[int] = ()
    """Columns whose cells are aligned at their right."""
    kind: int = -1
    """The column that holds the kind of a mark."""
    code: bool = False
    """Whether the first column holds keys."""


def _of_runs(
    runs: Sequence[RunRecord],
    caption: str,
    heads: Sequence[str],
    rows_of: Callable[[RunRecord], Iterator[Row]],
    numbers: Sequence[int],
) -> Table:
    """Return a table of all runs, whose names stand in the first column where there are several."""
    several = len(runs) > 1
    rows = [[*[run.name] * several, *row] for run in runs for row in rows_of(run)]
    return Table(caption, [*["run"] * several, *heads], rows, [column + several for column in numbers])


def state_words(run: RunRecord) -> str:
    """Return how a run stands, as part of a sentence."""
    step, total = run.curves.last, run.total
    at = "before its first step" if step is None else f"at step {step:,}" + (f" of {total:,}" if total else "")
    return f"{run.state.name} {at}" + (f": {run.state.why}" if run.state.why else "")


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return the few numbers that sum a run up, each with what it is."""
    columns = run.curves.columns
    pairs = []
    main = next(iter(leading(columns)), "")
    if main in columns:
        values = columns[main].values
        title = metric_label(main, run.verb).title.lower()
        pairs.append((f"{title}, first → last", f"{digits(values[0])} → {digits(values[-1])}"))
    for name, column in columns.items():
        segments, values = name.split("/"), column.values
        if name.startswith(EVALUATION) and segments[-1] in {"accuracy", "reward", "loss"} and len(pairs) < 3:
            ends = [values[0], values[-1]] if len(values) > 1 else values
            pairs.append((f"{segments[-1]} on {segments[1]}", " → ".join(map(digits, ends))))
    if "step_time" in columns:
        pairs.append(("time in steps", seconds_words(columns["step_time"].total)))
    present = sum(line.is_there for line in run.checkpoints)
    pairs.append(("checkpoints there", f"{present} of {len(run.checkpoints)} saved"))
    kinds = Counter(mark.kind for mark in run.marks)
    pairs.append(("failures / resumes", f"{kinds['failed']} / {kinds['resumed']}"))
    return [*pairs, ("alarms", str(kinds["alarm"]))] if kinds["alarm"] else pairs


def curve_words(runs: Sequence[RunRecord], name: str) -> str:
    """Return a curve in sentences, for those who do not see it and for those who want its numbers."""
    sentences = []
    for run in runs:
        columns = run.curves.columns
        names = [*[name] * (name in columns), *(metric for _, metric in evaluations_of(name, columns))]
        if words := "; ".join(_column_words(run, metric) for metric in names):
            sentences.append(f"{run.name}: {words}" if len(runs) > 1 else words)
    return ". ".join(sentences) + "."


def _column_words(run: RunRecord, name: str) -> str:
    column = run.curves.columns[name]
    finite = [(value, step) for value, step in zip(column.values, column.steps, strict=True) if math.isfinite(value)]
    if not finite:
        return f"{name} has no finite value"
    (low, low_step), (high, high_step) = min(finite), max(finite, key=lambda pair: (pair[0], -pair[1]))
    label = f"{name}: " if name.startswith(EVALUATION) else ""
    if len(finite) == 1:
        return f"{label}{digits(low)} at step {low_step:,}"
    return (
        f"{label}{digits(finite[0][0])} at step {finite[0][1]:,}, {digits(finite[-1][0])} at step {finite[-1][1]:,}, "
        f"lowest {digits(low)} at {low_step:,}, highest {digits(high)} at {high_step:,}"
    )


def times(runs: Sequence[RunRecord]) -> Table:
    """Return where the seconds went: each phase's share of all steps and evaluations."""

    def rows(run: RunRecord) -> Iterator[Row]:
        columns = run.curves.columns
        if "step_time" not in columns:
            return
        phases = {name: columns[name].total for name in columns if name.startswith(TIMING)}
        total = columns["step_time"].total + phases.get(EVALUATING, 0.0)
        for name, seconds in sorted(phases.items(), key=lambda pair: -pair[1]):
            share = f"{seconds / total:.1%}" if total and math.isfinite(total) else NOT_THERE
            mean = f"{1000 * seconds / max(1, len(columns['step_time'].steps)):,.1f}"
            yield [name.removeprefix(TIMING), mean, share, seconds_words(seconds)]

    return _of_runs(runs, "Seconds by phase", ["phase", "ms per step", "share", "in all"], rows, (1, 2, 3))


def memory_words(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what each run measured of memory, beside its plan."""
    for run in runs:
        planned, measured = run.planned.bytes_, run.measured_bytes
        name = f"{run.name}: " if len(runs) > 1 else ""
        if planned and measured:
            comparison = f"planned {size_words(planned)} of memory a rank, measured {size_words(measured)} on rank 0"
            yield f"{name}{comparison} ({measured / planned:.0%} of the plan)."
        elif measured:
            yield f"{name}at most {size_words(measured)} of memory on rank 0; there is no plan to compare it with."


def memory(runs: Sequence[RunRecord]) -> Table:
    """Return a row with a bar for each phase that plan.json and the run's events both know."""

    def rows(run: RunRecord) -> Iterator[Row]:
        resident = " (resident above the start)" * (run.planned.device == "cpu")
        for phase, took in run.measured_phases.items():
            if planned := run.planned.phases.get(phase):
                yield [phase + resident, size_words(planned), size_words(took), took / planned]

    return _of_runs(runs, "Plan against measured", ["phase", "planned", "measured", "of the plan"], rows, (1, 2))


def checkpoints(runs: Sequence[RunRecord]) -> Table:
    """Return the checkpoints."""

    def rows(run: RunRecord) -> Iterator[Row]:
        for line in run.checkpoints:
            size = NOT_THERE if line.bytes_ is None else size_words(line.bytes_)
            seconds = NOT_THERE if line.seconds is None else f"{line.seconds:.2f}"
            verified = "yes" if line.verified else "not noted"
            yield [f"{line.step:,}", size, seconds, verified, line.resumes if line.is_there else "deleted since"]

    heads = ["step", "size", "seconds to save", "verified", "resumes on"]
    return _of_runs(runs, "Checkpoints", heads, rows, (0, 1, 2))


def event_table(run: RunRecord) -> Table:
    """Return what happened, in sentences; saves and evaluations are summed up, since the curves show each."""
    rows = [_event_row(mark) for mark in run.marks if mark.kind not in {"saved", "evaluated"}]
    left_out = len(rows) - _FIRST_SENTENCES - _LAST_SENTENCES
    if left_out > 0:
        between = ["", "", "", f"{left_out:,} events between are left out"]
        rows = [*rows[:_FIRST_SENTENCES], between, *rows[-_LAST_SENTENCES:]]
    return Table(f"Events of {run.name}", ["step", "", "when", "what"], rows, [0], kind=1)


def _event_row(mark: Mark) -> list[str]:
    return [f"{mark.step:,}", "noted" if mark.kind == "other" else mark.kind, moment(mark.time), mark.text]


def event_counts(run: RunRecord) -> Iterator[str]:
    """Yield how often the run saved and was evaluated, and how many steps it made twice."""
    saves = [mark.step for mark in run.marks if mark.kind == "saved"]
    if saves:
        yield f"{counted(len(saves), 'checkpoint')} saved, the last of step {saves[-1]:,}."
    if evaluated := run.curves.evaluated:
        yield f"{counted(len(evaluated), 'evaluation')}, the last at step {evaluated[-1]:,}."
    if lost := sum(rewind.last - rewind.to for rewind in run.curves.rewinds):
        yield f"{counted(lost, 'step')} made twice."


def between_runs(runs: Sequence[RunRecord]) -> Table:
    """Return the keys in which the configurations of runs differ."""
    pairs = (setting_differences(runs[0].configuration, run.configuration) for run in runs[1:])
    keys = dict.fromkeys(key for differences in pairs for key, _, _ in differences)
    rows = [[key, *(run.configuration.get(key, NOT_THERE) for run in runs)] for key in keys]
    return Table("Keys in which the runs differ", ["key", *(run.name for run in runs)], rows, code=True)


def from_parent(run: RunRecord, before: Mapping[str, str]) -> Table:
    """Return the keys in which a run differs from the one that it started from."""
    rows = [row for row in setting_differences(before, run.configuration) if NOT_THERE not in row]
    return Table(f"Difference of {run.name} to its parent", ["key", "there", "here"], rows, code=True)


def configuration(run: RunRecord) -> Table:
    """Return the whole configuration."""
    rows = list(run.configuration.items())
    return Table(f"The whole configuration of {run.name}", ["key", "value"], rows, code=True)


def environment(runs: Sequence[RunRecord]) -> Table:
    """Return versions, ranks and devices."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    rows = [[name, *(run.versions.get(name, NOT_THERE) for run in runs)] for name in names]
    rows.append(["run", *(run.run_id[:8] or NOT_THERE for run in runs)])
    if any(run.starts for run in runs):
        for key in ("ranks", "device"):
            rows.append([key, *(_changes([str(start.get(key, NOT_THERE)) for start in run.starts]) for run in runs)])
        first = (moment(finite_number(run.starts[0].get("time"))) if run.starts else NOT_THERE for run in runs)
        rows += [["first start", *first], ["starts", *(str(len(run.starts)) for run in runs)]]
    return Table("Environment", ["", *(run.name for run in runs)], rows)


def _changes(values: Sequence[str]) -> str:
    changes = [value for index, value in enumerate(values) if index == 0 or values[index - 1] != value]
    return ", then ".join(changes) or NOT_THERE
