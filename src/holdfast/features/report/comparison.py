"""`holdfast runs compare`: two runs as numbers at equal steps, where they part, and what differed from the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.features.report.curves import Column
from holdfast.features.report.formats import NOT_THERE, counted, digits
from holdfast.features.report.metrics import EVALUATION, TIMING, leading
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.settings import setting_differences
from holdfast.features.report.tables import state_words
from holdfast.text.escaping import escaped

_STEPS = 5
"""Equal steps whose numbers are shown."""
_MEASURED = (TIMING, "throughput/", "memory/", "step_time", "ranks/")
"""Of the machine, which never measures the same twice."""


@dataclass(frozen=True)
class DivergencePoint:
    """The first step at which the metrics of two runs differ."""

    step: int
    metrics: tuple[str, ...]
    """All metrics that differ at the step."""
    first: float
    second: float
    """Both values of the first metric."""


def first_divergence(first: RunRecord, second: RunRecord) -> DivergencePoint | None:
    """Return where two runs part; None if all numbers of steps that both made are the same, times and memory aside."""
    steps: dict[int, list[str]] = {}
    for name in first.curves.columns.keys() & second.curves.columns.keys():
        if name.startswith(_MEASURED):
            continue
        step = _first_difference(first.curves.columns[name], second.curves.columns[name])
        if step is not None:
            steps.setdefault(step, []).append(name)
    if not steps:
        return None
    step = min(steps)
    order = [*leading(steps[step]), *sorted(steps[step])]
    names = tuple(dict.fromkeys(name for name in order if name in steps[step]))
    values = (_at(run.curves.columns[names[0]], step) for run in (first, second))
    return DivergencePoint(step, names, *(value for value in values if value is not None))


def _first_difference(first: Column, second: Column) -> int | None:
    values = dict(zip(second.steps, second.values, strict=True))
    for step, value in zip(first.steps, first.values, strict=True):
        counterpart = values.get(step)
        if counterpart is not None and value != counterpart and (value == value or counterpart == counterpart):  # noqa: PLR0124 - NaN
            return step
    return None


def _at(column: Column, step: int) -> float | None:
    return next((value for its, value in zip(column.steps, column.values, strict=True) if its == step), None)


def compare(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yield the lines of a comparison."""
    for run, name in zip((first, second), _names(first, second), strict=True):
        yield f"{name}: {run.verb}, {state_words(run)}"
        yield from (f"  {note}" for note in run.notes)
    yield from _difference("configuration", first.configuration, second.configuration)
    yield from _difference("environment", first.versions, second.versions)
    yield ""
    yield from _curves(first, second)
    yield ""
    yield _divergence_sentence(first, second)


def _difference(title: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    rows = [[key, first_value, second_value] for key, first_value, second_value in setting_differences(first, second)]
    yield ""
    if not rows:
        yield f"{title}: the same"
        return
    yield f"{title}: {counted(len(rows), 'key')} differ{'s' * (len(rows) == 1)}"
    yield from _table(rows)


def _curves(first: RunRecord, second: RunRecord) -> Iterator[str]:
    ours, theirs = first.curves.columns, second.curves.columns
    shared = ours.keys() & theirs.keys()
    names = [name for name in leading(shared) if name in shared]
    names += sorted(name for name in shared if name.startswith(EVALUATION))
    rows = [row for name in names for row in _at_equal_steps(name, ours[name], theirs[name])]
    for name in sorted(ours.keys() ^ theirs.keys()):
        if not name.startswith(_MEASURED):
            rows.append([name, NOT_THERE, *(("there", NOT_THERE) if name in ours else (NOT_THERE, "there")), NOT_THERE])
    if not rows:
        yield "curves: no step has a number in both"
        return
    yield "curves at equal steps"
    yield from _table([["metric", "step", *_names(first, second), "difference"], *rows], numbers=True)


def _at_equal_steps(name: str, first: Column, second: Column) -> Iterator[list[str]]:
    first_values = dict(zip(first.steps, first.values, strict=True))
    second_values = dict(zip(second.steps, second.values, strict=True))
    for step in _spread(sorted(first_values.keys() & second_values.keys())):
        difference = (
            "same" if first_values[step] == second_values[step] else digits(second_values[step] - first_values[step])
        )
        yield [name, str(step), digits(first_values[step]), digits(second_values[step]), difference]


def _names(first: RunRecord, second: RunRecord) -> tuple[str, str]:
    """Return what the runs are called, their paths where both have one name."""
    if first.name != second.name:
        return first.name, second.name
    return escaped(str(first.directory)), escaped(str(second.directory))


def _spread(steps: Sequence[int]) -> list[int]:
    """Return the first, the last and some steps between."""
    count = min(_STEPS, len(steps))
    return [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]


def _divergence_sentence(first: RunRecord, second: RunRecord) -> str:
    divergence = first_divergence(first, second)
    if divergence is None:
        both = min(run.curves.last or 0 for run in (first, second))
        return (
            f"All numbers of the steps that both have, up to step {both}, are equal; times and memory are not compared."
        )
    ours, theirs = _names(first, second)
    more = f" and {len(divergence.metrics) - 1} more" if len(divergence.metrics) > 1 else ""
    return (
        f"The first step that differs is {divergence.step}: {divergence.metrics[0]} is {divergence.first!r} in {ours} "
        f"and {divergence.second!r} in {theirs}{more}."
    )


def _table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
