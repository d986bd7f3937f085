"""Collects the JSON that the page's scripts draw: curves, marks, phases and completions of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from holdfast.features.report.curves import Column
from holdfast.features.report.metrics import (
    EVALUATION,
    TIMING,
    evaluations_of,
    leading,
    metric_label,
)
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.samples import Samples
from holdfast.features.report.story import ENTRY_KINDS
from holdfast.features.report.thinning import bucket_means, drawn_indices
from holdfast.text.escaping import escaped

SIGNIFICANT = 7
"""Digits of a number on the page."""
_OF_SAMPLES = 5
"""Digits of rewards, advantages and log-probabilities."""
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
        "charts": [_chart(name, names, verb) for name in leading(names)],
        "others": [{"name": name, "unit": metric_label(name, verb).unit} for name in names],
    }


def as_script(values: Any) -> str:
    """Return JSON that can stand between script tags: nothing in it ends the element or begins a comment."""
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def rounded(value: float | None, digits: int = SIGNIFICANT) -> float | int | None:
    """Return a number with so many digits that count; None for what is none."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _chart(name: str, names: Sequence[str], verb: str) -> dict[str, Any]:
    label = metric_label(name, verb)
    evaluations = [{"name": evaluation, "set": of_set} for of_set, evaluation in evaluations_of(name, names)]
    return {"name": name, "title": label.title, "unit": label.unit, "evaluations": evaluations}


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
        "curves": {escaped(name): _column(column, axes) for name, column in curves.columns.items()},
        "lost": {
            escaped(name): [_column(lost_column, axes) for lost_column in lost_columns[-_MOST_LOST:]]
            for name, lost_columns in curves.lost.items()
            if not name.startswith((TIMING, EVALUATION))
        },
        "steps": [_axis(axis) for axis in axes],
        "rewinds": [[rewind.to, rewind.last] for rewind in curves.rewinds],
        "marks": marks,
        "phases": _phases(run),
        "samples": samples_data(run.samples),
    }


def _column(column: Column, axes: dict[tuple[int, ...], int]) -> list[Any]:
    """Return [number of its steps, values]."""
    indices = drawn_indices(column.values)
    axis = tuple(column.steps[index] for index in indices)
    return [axes.setdefault(axis, len(axes)), [rounded(column.values[index]) for index in indices]]


def _axis(steps: tuple[int, ...]) -> dict[str, Any]:
    """Return steps as the first and what is added each time; where that is always 1, as the first and their number."""
    added = [after - before for before, after in pairwise(steps)]
    if added and set(added) == {1}:
        return {"from": steps[0], "count": len(steps)}
    return {"from": steps[0] if steps else 0, "added": added, "count": len(steps)}


def _phases(run: RunRecord) -> dict[str, Any]:
    """Return the mean seconds of each phase over stretches of the run."""
    columns = run.curves.columns
    times = columns.get("step_time")
    if times is None or not len(times.steps):
        return {}
    steps, _ = bucket_means(times.steps, times.values, _PHASE_POINTS)
    phase_seconds = {
        name.removeprefix(TIMING): bucket_means(times.steps, _at(times.steps, column), _PHASE_POINTS)[1]
        for name, column in columns.items()
        if name.startswith(TIMING)
    }
    ranked = sorted(phase_seconds, key=lambda name: -sum(phase_seconds[name]))
    phases = [[escaped(name), [rounded(value) for value in phase_seconds[name]]] for name in ranked]
    return {"steps": steps, "parts": phases}


def _at(steps: Sequence[int], column: Column) -> list[float]:
    """Return a phase's seconds at some steps; one that a step does not have took no time in it."""
    by_step = dict(zip(column.steps, column.values, strict=True))
    values = (by_step.get(step, 0.0) for step in steps)
    return [value if math.isfinite(value) else 0.0 for value in values]


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
            rounded(sample.reward, _OF_SAMPLES),
            rounded(sample.advantage, _OF_SAMPLES) if sample.trained else None,
            finishes.setdefault(escaped(sample.finish), len(finishes)),
            int(sample.trained),
            [rounded(sample.function_rewards.get(name), _OF_SAMPLES) for name in reward_names]
            if len(reward_names) > 1
            else 0,
        ]
        for sample in items
    ]
    full_texts = {str(index): _full_text(sample.full) for index, sample in enumerate(items) if sample.full is not None}
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
        "whole": full_texts,
    }


def _full_text(values: Mapping[str, Any]) -> dict[str, Any]:
    tokens = [
        [text, rounded(logprob, _OF_SAMPLES), rounded(advantage, _OF_SAMPLES)]
        for text, logprob, advantage in values["tokens"]
    ]
    full = {"prompt": values["prompt"], "completion": values["completion"], "tokens": tokens}
    return full | ({"turns": values["turns"]} if values["turns"] else {})
