"""Writes the sections of the page that need no script: numbers, tables and sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from holdfast.features.report.curves import Column
from holdfast.features.report.html import html_table, section, tag, text
from holdfast.features.report.metrics import (
    EVALUATING,
    EVALUATION,
    TIMING,
    evaluations_of,
    leading,
    metric_label,
)
from holdfast.features.report.reading import RunRecord
from holdfast.features.report.settings import NOT_THERE, setting_differences
from holdfast.features.report.story import Mark
from holdfast.files import size_words

_FIRST_SENTENCES, _LAST_SENTENCES = 100, 400
_WORDS = {
    "failed": "failed",
    "stopped": "stopped",
    "resumed": "resumed",
    "saved": "saved",
    "evaluated": "evaluated",
    "alarm": "alarm",
    "exported": "exported",
    "other": "noted",
}


def digits(value: float | None) -> str:
    """Return a number for a reader, with at most four digits that count."""
    if value is None or not math.isfinite(value):
        return NOT_THERE
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.3g}"


def state_words(run: RunRecord) -> str:
    """Return how a run stands, as part of a sentence."""
    step, total = run.curves.last, run.total
    at = "before its first step" if step is None else f"at step {step:,}" + (f" of {total:,}" if total else "")
    why = f": {run.state.why}" if run.state.why else ""
    return {"done": "done", "running": "running", "stopped": "stopped", "failed": "failed"}[
        run.state.name
    ] + f" {at}{why}"


def seconds_words(seconds: float) -> str:
    """Return a length of time: 41 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return NOT_THERE
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def moment(seconds: float | None) -> str:
    """Return a time of the clock here; empty for none."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%d %b %Y %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return ""


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return the few numbers that sum a run up, each with what it is."""
    columns, verb = run.curves.columns, run.verb
    pairs = []
    main = next(iter(leading(columns)), None)
    for name in [main] if main in columns else []:
        values = columns[name].values
        pairs.append(
            (
                f"{metric_label(name, verb).title.lower()}, first → last",
                f"{digits(values[0])} → {digits(values[-1])}",
            )
        )
    for name, column in columns.items():
        segments = name.split("/")
        if name.startswith(EVALUATION) and segments[-1] in {"accuracy", "reward", "loss"} and len(pairs) < 3:
            values = column.values
            value_text = digits(values[0]) if len(values) == 1 else f"{digits(values[0])} → {digits(values[-1])}"
            pairs.append((f"{segments[-1]} on {segments[1]}", value_text))
    if "step_time" in columns:
        pairs.append(("time in steps", seconds_words(columns["step_time"].total)))
    present = [line for line in run.checkpoints if line.is_there]
    pairs.append(("checkpoints there", f"{len(present)} of {len(run.checkpoints)} saved"))
    kinds = Counter(mark.kind for mark in run.marks)
    pairs.append(("failures / resumes", f"{kinds['failed']} / {kinds['resumed']}"))
    if kinds["alarm"]:
        pairs.append(("alarms", str(kinds["alarm"])))
    return pairs


def summary_section(runs: Sequence[RunRecord]) -> str:
    """Return the head of the page."""
    blocks = []
    for index, run in enumerate(runs):
        name = tag("span", text(run.name), class_=f"run run-{index % 8}") if len(runs) > 1 else ""
        line = tag("p", name, text(f"{run.verb}, {state_words(run)}"), class_=f"state {run.state.name}")
        cards = "".join(tag("div", tag("dt", text(label)), tag("dd", text(value))) for label, value in facts(run))
        blocks.append(tag("div", line, tag("dl", cards, class_="facts"), class_="summary"))
    return "".join(blocks)


def notes_section(runs: Sequence[RunRecord]) -> str:
    """Return what could not be read, or is not a number."""
    lines = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return tag("ul", *(tag("li", text(line)) for line in lines), class_="notes") if lines else ""


def curve_words(run: RunRecord, name: str) -> str:
    """Return a curve in a sentence, for those who do not see it and for those who want its numbers."""
    names = [
        *([name] if name in run.curves.columns else []),
        *(metric for _, metric in evaluations_of(name, run.curves.columns)),
    ]
    return "; ".join(filter(None, (_column_words(run, metric) for metric in names)))


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


def _seconds_by_phase(columns: Mapping[str, Column]) -> tuple[dict[str, float], float]:
    """Return the seconds of each phase, and of all steps and evaluations."""
    phases = {name: columns[name].total for name in columns if name.startswith(TIMING)}
    total = columns["step_time"].total + phases.get(EVALUATING, 0.0)
    return phases, total


def times_section(runs: Sequence[RunRecord]) -> str:
    """Return where the seconds and the memory went; the chart over steps is drawn where there is one run."""
    rows = []
    for run in runs:
        columns = run.curves.columns
        if "step_time" not in columns:
            continue
        steps, (phases, total) = len(columns["step_time"].steps), _seconds_by_phase(columns)
        for name, seconds in sorted(phases.items(), key=lambda pair: -pair[1]):
            share = f"{seconds / total:.1%}" if total and math.isfinite(total) else NOT_THERE
            cells = [name.removeprefix(TIMING), f"{1000 * seconds / max(1, steps):,.1f}", share, seconds_words(seconds)]
            rows.append([text(cell) for cell in ([run.name, *cells] if len(runs) > 1 else cells)])
    if not rows:
        return ""
    heads = ["phase", "ms per step", "share", "in all"]
    several = len(runs) > 1
    body = html_table(
        ["run", *heads] if several else heads,
        rows,
        numbers=[column + several for column in (1, 2, 3)],
        caption="Seconds by phase",
    )
    legend = tag("p", class_="legend", id="phases-legend")
    chart = tag("div", id="phases", class_="chart", role="img", aria_label="Seconds per step by phase")
    return section("time", "Time by phase", *(() if several else (legend, chart)), body, _memory(runs))


def _memory(runs: Sequence[RunRecord]) -> str:
    lines, rows = [], []
    for run in runs:
        planned, measured = run.planned.bytes_, run.measured_bytes
        name = f"{run.name}: " if len(runs) > 1 else ""
        if planned and measured:
            comparison = f"planned {size_words(planned)} of memory a rank, measured {size_words(measured)} on rank 0"
            lines.append(f"{name}{comparison} ({measured / planned:.0%} of the plan).")
        elif measured:
            lines.append(
                f"{name}at most {size_words(measured)} of memory on rank 0; there is no plan to compare it with."
            )
        rows += _plan_against_measured(run, several=len(runs) > 1)
    heads = [*["run"] * (len(runs) > 1), "phase", "planned", "measured", "of the plan"]
    number_columns = [len(heads) - 3, len(heads) - 2]
    chart = html_table(heads, rows, numbers=number_columns, caption="Plan against measured") if rows else ""
    return "".join(tag("p", text(line), class_="memory") for line in lines) + chart


def _plan_against_measured(run: RunRecord, *, several: bool) -> list[list[str]]:
    """Return a row with a bar for each phase that plan.json and the run's events both know."""
    rows, measured = [], run.measured_phases
    resident = " (resident above the start)" * (run.planned.device == "cpu")
    for phase, took in measured.items():
        if planned := run.planned.phases.get(phase):
            share = took / planned
            bar = tag("meter", text(f"{share:.0%}"), min="0", max="1.5", high="1.1", value=f"{min(share, 1.5):.3f}")
            cells = [run.name, phase] if several else [phase]
            cells += [size_words(planned), size_words(took)]
            rows.append([*map(text, cells), f"{bar} {text(f'{share:.0%}{resident}')}"])
    return rows


def checkpoints_section(runs: Sequence[RunRecord]) -> str:
    """Return the table of checkpoints."""
    several = len(runs) > 1
    rows = []
    for run in runs:
        for line in run.checkpoints:
            size = NOT_THERE if line.bytes_ is None else size_words(line.bytes_)
            seconds = NOT_THERE if line.seconds is None else f"{line.seconds:.2f}"
            verified = "yes" if line.verified else "not noted"
            cells = [f"{line.step:,}", size, seconds, verified, line.resumes if line.is_there else "deleted since"]
            rows.append([text(cell) for cell in ([run.name, *cells] if several else cells)])
    heads = ["step", "size", "seconds to save", "verified", "resumes on"]
    body = (
        html_table(
            ["run", *heads] if several else heads,
            rows,
            numbers=[column + several for column in (0, 1, 2)],
            caption="Checkpoints",
        )
        if rows
        else tag("p", text("No checkpoint was saved."))
    )
    return section("checkpoints", "Checkpoints", body)


def events_section(runs: Sequence[RunRecord]) -> str:
    """Return what happened, in sentences; saves and evaluations are summed up, since the curves show each."""
    blocks = []
    for run in runs:
        heading = tag("h3", text(run.name)) if len(runs) > 1 else ""
        sentences = [mark for mark in run.marks if mark.kind not in {"saved", "evaluated"}]
        rows = [_event_row(mark) for mark in sentences]
        left_out = len(rows) - _FIRST_SENTENCES - _LAST_SENTENCES
        if left_out > 0:
            between = ["", "", "", text(f"{left_out:,} events between are left out")]
            rows = [*rows[:_FIRST_SENTENCES], between, *rows[-_LAST_SENTENCES:]]
        body = (
            html_table(["step", "", "when", "what"], rows, numbers=[0], caption=f"Events of {run.name}")
            if rows
            else tag("p", text("Nothing failed, nothing was stopped, and no alarm sounded."))
        )
        blocks += [heading, tag("p", text(" ".join(_counts(run)))), body]
    return section("events", "What happened", *blocks)


def _event_row(mark: Mark) -> list[str]:
    kind = tag("span", text(_WORDS[mark.kind]), class_=f"kind {mark.kind}")
    return [text(f"{mark.step:,}"), kind, text(moment(mark.time)), text(mark.text)]


def _counts(run: RunRecord) -> Iterator[str]:
    saves = [mark.step for mark in run.marks if mark.kind == "saved"]
    if saves:
        yield (
            f"{len(saves):,} checkpoints were saved, the last of step {saves[-1]:,}."
            if len(saves) > 1
            else (f"One checkpoint was saved, of step {saves[0]:,}.")
        )
    if run.curves.evaluated:
        count = len(run.curves.evaluated)
        yield (
            f"It was evaluated {count:,} times."
            if count > 1
            else f"It was evaluated once, at step {run.curves.evaluated[0]:,}."
        )
    lost = sum(rewind.last - rewind.to for rewind in run.curves.rewinds)
    if lost:
        yield f"{lost:,} steps were made twice." if lost > 1 else "One step was made twice."


def configuration_section(runs: Sequence[RunRecord]) -> str:
    """Return the configuration, what differs between runs, and what differs from what a run started from."""
    blocks = []
    if len(runs) > 1:
        blocks += [tag("h3", text("Where the runs differ")), _between(runs)]
    for run in runs:
        if run.parent is not None:
            name = f"{run.name} started" if len(runs) > 1 else "It started"
            blocks.append(tag("p", text(f"{name} from {run.parent.description}.")))
            blocks.append(_from_parent(run, run.parent.configuration))
    for run in runs:
        rows = [[tag("code", text(key)), text(value)] for key, value in run.configuration.items()]
        title = f"The whole configuration of {run.name}" if len(runs) > 1 else "The whole configuration"
        body = html_table(["key", "value"], rows, caption=title)
        blocks.append(tag("details", tag("summary", text(f"{title}, {len(rows)} keys")), body))
    rule = "Paths are shown by their last name and addresses by their host; credentials and kwargs are left out."
    return section("configuration", "Configuration", *blocks, tag("p", text(rule), class_="rule"))


def _from_parent(run: RunRecord, before: Mapping[str, str] | None) -> str:
    if before is None:
        return tag("p", text("That run does not lie beside this one, so its configuration cannot be compared."))
    differing = [row for row in setting_differences(before, run.configuration) if NOT_THERE not in row]
    if not differing:
        return tag("p", text("Keys that both have are the same."))
    rows = [[tag("code", text(key)), text(parent_value), text(run_value)] for key, parent_value, run_value in differing]
    return html_table(["key", "there", "here"], rows, caption=f"Difference of {run.name} to its parent")


def _between(runs: Sequence[RunRecord]) -> str:
    keys = list(
        dict.fromkeys(
            key for run in runs[1:] for key, _, _ in setting_differences(runs[0].configuration, run.configuration)
        )
    )
    if not keys:
        return tag("p", text("Their configurations are the same."))
    rows = [[tag("code", text(key)), *(text(run.configuration.get(key, NOT_THERE)) for run in runs)] for key in keys]
    return html_table(["key", *(run.name for run in runs)], rows, caption="Keys in which the runs differ")


def environment_section(runs: Sequence[RunRecord]) -> str:
    """Return versions, ranks and devices."""
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = [[text(name), *(text(run.versions.get(name, NOT_THERE)) for run in runs)] for name in names]
    rows += [[text(label), *(text(value) for value in values)] for label, values in _machines(runs)]
    return section(
        "environment", "Environment", html_table(["", *(run.name for run in runs)], rows, caption="Environment")
    )


def _machines(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    starts = [[event for event in run.events if event.get("event") == "start"] for run in runs]
    yield "run", [run.run_id[:8] or NOT_THERE for run in runs]
    if any(starts):
        for key in ("ranks", "device"):
            yield key, [_changes([str(event.get(key, NOT_THERE)) for event in start_events]) for start_events in starts]
        yield (
            "first start",
            [moment(start_events[0].get("time")) if start_events else NOT_THERE for start_events in starts],
        )
        yield "starts", [str(len(start_events)) for start_events in starts]


def _changes(values: Sequence[str]) -> str:
    changes = [value for index, value in enumerate(values) if index == 0 or values[index - 1] != value]
    return ", then ".join(changes) or NOT_THERE


def age(seconds: float) -> str:
    """Return how long something takes or took, as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
