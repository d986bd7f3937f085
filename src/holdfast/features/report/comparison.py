"""`holdfast runs compare`: two runs as numbers at equal steps, where they part, and what differed from the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.features.report.curves import Column
from holdfast.features.report.metrics import EVALUATION, TIMING, leading
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.sections import digits, state_words
from holdfast.features.report.settings import NOT_THERE, setting_differences
from holdfast.text.escaping import escaped

_STEPS = 5
"""Equal steps whose numbers are shown."""
_MEASURED = (TIMING, "throughput/", "memory/", "step_time", "ranks/")
"""Of the machine, which never measures the same twice."""


@dataclass(frozen=True)
class Parting:
    """The first step at which two runs have another number."""

    step: int
    metrics: tuple[str, ...]
    """All that differ there."""
    first: float
    second: float
    """Of the first metric."""


def parting(first: RunRecord, second: RunRecord) -> Parting | None:
    """Return where two runs part; None if all numbers of steps that both made are the same, times and memory aside."""
    steps: dict[int, list[str]] = {}
    for name in first.curves.columns.keys() & second.curves.columns.keys():
        if name.startswith(_MEASURED):
            continue
        step = _first_other(first.curves.columns[name], second.curves.columns[name])
        if step is not None:
            steps.setdefault(step, []).append(name)
    if not steps:
        return None
    step = min(steps)
    order = [*leading(steps[step]), *sorted(steps[step])]
    names = tuple(dict.fromkeys(name for name in order if name in steps[step]))
    values = (_at(run.curves.columns[names[0]], step) for run in (first, second))
    return Parting(step, names, *(value for value in values if value is not None))


def _first_other(one: Column, other: Column) -> int | None:
    values = dict(zip(other.steps, other.values, strict=True))
    for step, value in zip(one.steps, one.values, strict=True):
        there = values.get(step)
        if there is not None and value != there and (value == value or there == there):  # noqa: PLR0124 - NaN
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
    yield _parting_words(first, second)


def _difference(what: str, one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    rows = [[key, here, there] for key, here, there in setting_differences(one, other)]
    yield ""
    if not rows:
        yield f"{what}: the same"
        return
    yield f"{what}: {len(rows)} key{'s' * (len(rows) != 1)} differ{'s' * (len(rows) == 1)}"
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


def _at_equal_steps(name: str, one: Column, other: Column) -> Iterator[list[str]]:
    here = dict(zip(one.steps, one.values, strict=True))
    there = dict(zip(other.steps, other.values, strict=True))
    for step in _spread(sorted(here.keys() & there.keys())):
        difference = "same" if here[step] == there[step] else digits(there[step] - here[step])
        yield [name, str(step), digits(here[step]), digits(there[step]), difference]


def _names(first: RunRecord, second: RunRecord) -> tuple[str, str]:
    """Return what the runs are called, their places where both have one name."""
    if first.name != second.name:
        return first.name, second.name
    return escaped(str(first.directory)), escaped(str(second.directory))


def _spread(steps: Sequence[int]) -> list[int]:
    """Return the first, the last and some steps between."""
    count = min(_STEPS, len(steps))
    return [steps[round(place * (len(steps) - 1) / max(1, count - 1))] for place in range(count)]


def _parting_words(first: RunRecord, second: RunRecord) -> str:
    place = parting(first, second)
    if place is None:
        both = min(run.curves.last or 0 for run in (first, second))
        return (
            f"All numbers of the steps that both have, up to step {both}, are equal; times and memory are not compared."
        )
    ours, theirs = _names(first, second)
    more = f" and {len(place.metrics) - 1} more" if len(place.metrics) > 1 else ""
    return (
        f"The first step that differs is {place.step}: {place.metrics[0]} is {place.first!r} in {ours} and "
        f"{place.second!r} in {theirs}{more}."
    )


def _table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
