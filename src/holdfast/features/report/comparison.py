"""`holdfast runs compare`: two runs as numbers at equal steps, where they part, and what differed from the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

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


def compare(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yield the lines of a comparison."""
    names = first.name, second.name
    if first.name == second.name:
        names = escaped(str(first.directory)), escaped(str(second.directory))
    for run, name in zip((first, second), names, strict=True):
        yield f"{name}: {run.verb}, {state_words(run)}"
        yield from (f"  {note}" for note in run.notes)
    yield from _difference("configuration", first.configuration, second.configuration)
    yield from _difference("environment", first.versions, second.versions)
    yield ""
    ours, theirs = first.curves.columns, second.curves.columns
    shared = ours.keys() & theirs.keys()
    shown = [name for name in leading(shared) if name in shared]
    shown += sorted(name for name in shared if name.startswith(EVALUATION))
    rows = [row for name in shown for row in _at_equal_steps(name, _equal_steps(ours[name], theirs[name]))]
    for name in sorted(ours.keys() ^ theirs.keys()):
        if not name.startswith(_MEASURED):
            rows.append(
                [name, NOT_THERE, *("there" if name in run else NOT_THERE for run in (ours, theirs)), NOT_THERE]
            )
    if rows:
        yield "curves at equal steps"
        yield from _table([["metric", "step", *names, "difference"], *rows], numbers=True)
    else:
        yield "curves: no step has a number in both"
    yield ""
    both = min(run.curves.last or 0 for run in (first, second))
    yield (
        _divergence(ours, theirs, names)
        or f"All numbers of the steps that both have, up to step {both}, are equal; times and memory are not compared."
    )


def _difference(title: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    rows = setting_differences(first, second)
    yield ""
    if rows:
        yield f"{title}: {counted(len(rows), 'key')} differ{'s' * (len(rows) == 1)}"
        yield from _table(rows)
    else:
        yield f"{title}: the same"


def _equal_steps(first: Column, second: Column) -> dict[int, tuple[float, float]]:
    """Return both values of each step that both columns have."""
    values = dict(zip(second.steps, second.values, strict=True))
    pairs = zip(first.steps, first.values, strict=True)
    return {step: (value, values[step]) for step, value in pairs if step in values}


def _at_equal_steps(name: str, pairs: Mapping[int, tuple[float, float]]) -> Iterator[list[str]]:
    steps = list(pairs)
    count = min(_STEPS, len(steps))
    for index in range(count):  # the first, the last and some between
        step = steps[round(index * (len(steps) - 1) / max(1, count - 1))]
        first, second = pairs[step]
        difference = "same" if first == second else digits(second - first)
        yield [name, str(step), digits(first), digits(second), difference]


def _divergence(ours: Mapping[str, Column], theirs: Mapping[str, Column], runs: Sequence[str]) -> str | None:
    """Return the first step at which numbers differ; None if none does, times and memory aside."""
    steps: dict[int, dict[str, tuple[float, float]]] = {}
    for name in sorted(ours.keys() & theirs.keys()):
        if name.startswith(_MEASURED):
            continue
        for step, (first, second) in _equal_steps(ours[name], theirs[name]).items():
            if first != second and not (math.isnan(first) and math.isnan(second)):
                steps.setdefault(step, {})[name] = first, second
                break
    if not steps:
        return None
    step, differing = min(steps.items(), key=itemgetter(0))
    name = next(name for name in [*leading(differing), *differing] if name in differing)
    first, second = differing[name]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"The first step that differs is {step}: {name} is {first!r} in {runs[0]} and {second!r} in {runs[1]}{more}."


def _table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
