"""Collects the JSON that the page's script draws: curves, marks, phases and completions of runs.

A long curve is thinned by a rule that keeps every extreme; points without a finite value are drawn as gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from holdfast.features.report.curves import Column
from holdfast.features.report.formats import OF_SAMPLES, rounded
from holdfast.features.report.metrics import EVALUATION, TIMING, evaluations_of, leading, metric_label
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.samples import Samples
from holdfast.features.report.story import ENTRY_KINDS
from holdfast.text.escaping import escaped

BUCKETS = 250
MOST_POINTS = 4 * BUCKETS
RULE = (
    f"Of curves with more than {MOST_POINTS:,} points, each of {BUCKETS} equal parts shows its first, lowest, highest "
    "and last one: no extreme is left out."
)
MOST_MARKS = 5_000
"""Of one kind; beyond, they are thinned out evenly."""
_PHASE_POINTS = 200
_MOST_LOST = 200
"""Lost parts of one metric that are drawn, the newest."""


def page_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return everything that is drawn."""
    names = sorted({name for run in runs for name in run.curves.columns})
    verb = runs[0].verb
    return {
        "runs": [_run(run) for run in runs],
        "charts": [
            {"name": name, **metric_label(name, verb)._asdict(), "evaluations": evaluations_of(name, names)}
            for name in leading(names)
        ],
        "others": {name: metric_label(name, verb).unit for name in names},
    }


def _run(run: RunRecord) -> dict[str, Any]:
    axes: dict[tuple[int, ...], int] = {}
    curves = run.curves
    marks: dict[str, list[list[Any]]] = {}
    for kind in ENTRY_KINDS:
        # The page looks for the nearest one, and a rewind goes back in steps.
        of_kind = sorted(([mark.step, mark.text] for mark in run.marks if mark.kind == kind), key=itemgetter(0))
        marks[kind] = of_kind[:: -(-len(of_kind) // MOST_MARKS) or 1]
    return {
        "name": run.name,
        "curves": {name: _column(column, axes) for name, column in curves.columns.items()},
        "lost": {
            name: [_column(lost_column, axes) for lost_column in lost_columns[-_MOST_LOST:]]
            for name, lost_columns in curves.lost.items()
            if not name.startswith((TIMING, EVALUATION))
        },
        "steps": list(axes),
        "rewinds": [[rewind.to, rewind.last] for rewind in curves.rewinds],
        "marks": marks,
        "phases": _phases(run),
        "samples": samples_data(run.samples),
    }


def _column(column: Column, axes: dict[tuple[int, ...], int]) -> list[Any]:
    """Return [number of its steps, values]; metrics of the same steps share them."""
    indices = drawn_indices(column.values)
    axis = tuple(column.steps[index] for index in indices)
    return [axes.setdefault(axis, len(axes)), [rounded(column.values[index]) for index in indices]]


def drawn_indices(values: Sequence[float]) -> list[int] | range:
    """Return the indices of the points that are drawn, in order."""
    size = len(values)
    if size <= MOST_POINTS:
        return range(size)
    indices: set[int] = set()
    for bucket in range(BUCKETS):
        start, end = bucket * size // BUCKETS, (bucket + 1) * size // BUCKETS
        part = values[start:end]
        finite = [value for value in part if math.isfinite(value)]
        indices |= {start, end - 1}
        if finite:
            indices |= {start + part.index(min(finite)), start + part.index(max(finite))}
        if len(finite) < len(part):
            indices.add(next(place for place in range(start, end) if not math.isfinite(values[place])))
    return sorted(indices)


def _phases(run: RunRecord) -> dict[str, Any]:
    """Return the mean seconds of each phase over stretches of the run; a step without a phase took no time in it."""
    columns = run.curves.columns
    times = columns.get("step_time")
    if times is None or not len(times.steps):
        return {}
    means = {}
    for name, column in columns.items():
        if name.startswith(TIMING):
            seconds = {
                step: value for step, value in zip(column.steps, column.values, strict=True) if math.isfinite(value)
            }
            means[name.removeprefix(TIMING)] = bucket_means([seconds.get(step, 0.0) for step in times.steps])
    ranked = sorted(means, key=lambda name: -sum(means[name]))
    return {
        "steps": [times.steps[end - 1] for _, end in _spans(len(times.steps))],
        "parts": [[name, [rounded(value) for value in means[name]]] for name in ranked],
    }


def _spans(size: int) -> list[tuple[int, int]]:
    count = min(_PHASE_POINTS, size)
    return [(size * number // count, size * (number + 1) // count) for number in range(count)]


def bucket_means(values: Sequence[float]) -> list[float]:
    """Return the mean value of each of equal parts; of few points, the points."""
    return [sum(values[start:end]) / (end - start) for start, end in _spans(len(values))]


def samples_data(samples: Samples) -> dict[str, Any]:
    """Return completions in few bytes: prompts and images once, rows as lists."""
    items = samples.items
    prompts: dict[tuple[str, tuple[str, ...]], int] = {}
    finishes: dict[str, int] = {}
    reward_names = list(dict.fromkeys(name for sample in items for name in sample.function_rewards))
    rows = [
        [
            sample.step,
            sample.sample_id,
            prompts.setdefault((sample.prompt, sample.images), len(prompts)),
            sample.completion,
            rounded(sample.reward, OF_SAMPLES),
            rounded(sample.advantage, OF_SAMPLES) if sample.trained else None,
            finishes.setdefault(escaped(sample.finish), len(finishes)),
            int(sample.trained),
            [rounded(sample.function_rewards.get(name), OF_SAMPLES) for name in reward_names]
            if len(reward_names) > 1
            else 0,
        ]
        for sample in items
    ]
    return {
        "prompts": [prompt for prompt, _ in prompts],
        "images": {
            index: [name for name in names if name in samples.images]
            for index, (_, names) in enumerate(prompts)
            if names
        },
        "files": samples.images,
        "finishes": list(finishes),
        "parts": [escaped(name) for name in reward_names],
        "rows": rows,
        "whole": {str(index): _full_text(sample.full) for index, sample in enumerate(items) if sample.full is not None},
    }


def _full_text(values: Mapping[str, Any]) -> dict[str, Any]:
    tokens = [
        [text, rounded(logprob, OF_SAMPLES), rounded(advantage, OF_SAMPLES)]
        for text, logprob, advantage in values["tokens"]
    ]
    full = {"prompt": values["prompt"], "completion": values["completion"], "tokens": tokens}
    return full | ({"turns": values["turns"]} if values["turns"] else {})
