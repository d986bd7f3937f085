"""`holdfast watch`: shows a run in a terminal of 60 to 200 columns while it goes on. It never writes to the run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from holdfast.features.report.curves import finite_number
from holdfast.features.report.formats import digits, seconds_words
from holdfast.features.report.metrics import EVALUATION, TIMING, leading, metric_label
from holdfast.features.report.reading import RunReader, RunRecord
from holdfast.files import size_words
from holdfast.metrics.sink import METRICS
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_FRAME_SECONDS = 2.0
_TWO_COLUMNS = 110
"""Width from which two columns stand side by side."""
_MOST_CURVES, _LAST_STEPS, _MOST_RANKS = 7, 20, 16
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_STYLES = {"running": "bold green", "done": "bold", "stopped": "bold yellow", "failed": "bold red"}
_MARK_STYLES = {"failed": "red", "alarm": "yellow", "stopped": "yellow", "resumed": "green"}
_SILENT_SECONDS = 10.0
"""After which a rank without a word is shown in red; a beat comes every second."""


def watch_run(directory: Path, console: Console | None = None) -> None:
    """Show a run until it has ended, or once where no terminal is.

    Raises:
        UserError: It is not the directory of a run.
    """
    from rich.console import Console
    from rich.live import Live

    console = console or Console(highlight=False)
    reader = RunReader(directory, follows=True)
    if not console.is_terminal:
        console.print(screen(reader.update(), console), soft_wrap=False)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            run = reader.update()
            live.update(screen(run, console), refresh=True)
            if run.state.name != "running":
                return
            time.sleep(_FRAME_SECONDS)


def screen(run: RunRecord, console: Console) -> RenderableType:
    """Return what is shown of a run."""
    from rich.console import Group

    width = console.width
    bars = _BARS if console.encoding.lower().startswith("utf") else _PLAIN_BARS
    head = [_head(run), _progress(run, min(width, 120))]
    if width < _TWO_COLUMNS:
        return Group(*head, *_numbers(run, width, bars), *_state(run), *_samples(run, width))
    left_width = width * 3 // 5 - 2
    columns = _grid({"width": left_width}, {"width": width - left_width - 4}, padding=2)
    columns.add_row(Group(*_numbers(run, left_width, bars)), Group(*_state(run)))
    return Group(*head, columns, *_samples(run, width))


def _grid(*columns: dict[str, Any], padding: int = 1) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, padding))
    for column in columns:
        grid.add_column(no_wrap=True, overflow="ellipsis", **column)
    return grid


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _head(run: RunRecord) -> Text:
    line = _line(run.name, "bold").append(f"  {run.verb}  ", "not bold").append(run.state.name, _STYLES[run.state.name])
    return line.append(f": {escaped(run.state.why)}", "not bold") if run.state.why else line


def _progress(run: RunRecord, width: int) -> RenderableType:
    """Return step, bar and the time that is left at the pace of the last steps."""
    from rich.progress_bar import ProgressBar

    step, total = run.curves.last or 0, run.total
    cells: list[RenderableType] = [_line(f"step {step:,}" + (f" of {total:,}" if total else ""))]
    tail = "  ".join(_clock(run, step, total)) if run.state.name == "running" else ""
    room = width - sum(len(str(cell)) for cell in cells) - len(tail) - 4
    if total and room >= 8:
        cells.append(ProgressBar(total, step, width=room, complete_style="green", finished_style="green"))
    grid = _grid(*[{}] * (len(cells) + 1), padding=2)
    grid.add_row(*cells, _line(tail))
    return grid


def _clock(run: RunRecord, step: int, total: int | None) -> Iterator[str]:
    """Yield how long the run is going on, and how long it will."""
    now = time.time()
    started = finite_number(run.starts[-1].get("time")) if run.starts else None
    if started is not None:
        yield f"{seconds_words(max(0.0, now - started))} since the start"
    times = run.curves.columns.get("step_time")
    if total and times is not None and times.values:
        pace = fmean(_finite(times.values[-_LAST_STEPS:]) or [0.0])
        since = max(0.0, now - (run.directory / METRICS).stat().st_mtime)
        yield f"{seconds_words(max(0.0, pace * (total - step) - min(since, pace)))} left"


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _numbers(run: RunRecord, width: int, bars: str) -> Iterator[RenderableType]:
    """Yield the sparklines, and what the last steps were spent on."""
    columns = run.curves.columns
    names = [name for name in leading(columns) if name in columns][:_MOST_CURVES]
    names += [
        name for name in columns if name.startswith(EVALUATION) and name.endswith(("/accuracy", "/reward", "/loss"))
    ][:2]
    labels = [name if name.startswith(EVALUATION) else metric_label(name, run.verb).title for name in names]
    widest = min(max(map(len, labels), default=0), width // 3)
    room = max(8, width - widest - 12)
    grid = _grid({"width": widest}, {"width": 9, "justify": "right"}, {"width": room, "style": "cyan"})
    for name, label in zip(names, labels, strict=True):
        values = columns[name].values
        grid.add_row(_line(label), digits(values[-1]), sparkline(values, room, bars))
    yield _line("\nnumbers", "bold")
    yield grid if names else _line("no step yet")
    timed = columns.get("step_time")
    of_steps = set(timed.steps[-_LAST_STEPS:]) if timed else set()
    means = {}
    for name in (name for name in columns if name.startswith(TIMING)):
        # A mean over steps, or where not every step has a phase, over those that have.
        label = name.removeprefix(TIMING) + ("" if of_steps.issubset(columns[name].steps[-_LAST_STEPS:]) else ", each")
        means[label] = fmean(_finite(columns[name].values[-_LAST_STEPS:]) or [0.0])
    if not means:
        return
    largest, room = max(means.values()) or 1.0, max(6, width - 34)
    grid = _grid({"width": 20}, {"width": 10, "justify": "right"}, {"width": room, "style": "blue"})
    for name, seconds in sorted(means.items(), key=lambda pair: -pair[1])[:6]:
        grid.add_row(_line(name), f"{1000 * seconds:,.1f} ms", bars[-1] * round(room * seconds / largest))
    yield _line(f"\nphases, mean of the last {_LAST_STEPS} steps", "bold")
    yield grid


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return a curve in one line; each column is the mean of its steps, a blank one has no finite value."""
    size = len(values)
    count = min(width, size)
    spans = [(size * column // count, size * (column + 1) // count) for column in range(count)]
    means = [fmean(bucket) if (bucket := _finite(values[start:end])) else None for start, end in spans]
    finite = [value for value in means if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else bars[round((value - low) * scale)] for value in means)


def _state(run: RunRecord) -> Iterator[RenderableType]:
    """Yield ranks, checkpoints and what went wrong."""
    if run.ranks:
        yield _line("\nranks", "bold")
    silent = [rank.age > _SILENT_SECONDS for rank in run.ranks]
    for rank, is_silent in zip(run.ranks[:_MOST_RANKS], silent, strict=False):
        position = f"step {rank.step}  " if rank.step is not None else ""
        ago = "a second ago" if rank.age < 2 else f"{seconds_words(rank.age)} ago"
        words = f"{position}{rank.phase or 'starting'}  {'SILENT, ' if is_silent else ''}{ago}"
        yield _line(f"rank {rank.rank}  {words}", "red" if is_silent else "")
    more = len(run.ranks) - _MOST_RANKS
    if more > 0:
        yield _line(f"and {more} more, {sum(silent[_MOST_RANKS:]) or 'none'} of them silent")
    yield _line("\ncheckpoints", "bold")
    present = [line for line in run.checkpoints if line.is_there]
    for line in present[-3:]:
        size = "" if line.bytes_ is None else f"  {size_words(line.bytes_)}"
        seconds = "" if line.seconds is None else f"  {line.seconds:.2f} s"
        yield _line(f"step {line.step}{size}{seconds}  {'verified' if line.verified else 'not noted as verified'}")
    if not present:
        yield _line("none yet")
    trouble = [mark for mark in run.marks if mark.kind in _MARK_STYLES]
    yield _line("\nhealth", "bold")
    for mark in trouble[-4:]:
        yield _line(f"step {mark.step} {mark.kind}: {mark.text}", _MARK_STYLES[mark.kind])
    if not trouble:
        yield _line("no alarm, no failure")


def _samples(run: RunRecord, width: int) -> Iterator[RenderableType]:
    """Yield the best, the worst and the newest completion of the last step."""
    items = run.samples.items
    if not items:
        return
    yield _line(f"\ncompletions of step {items[-1].step}", "bold")
    rewards = [-math.inf if item.reward is None else item.reward for item in items]
    order = sorted(range(len(items)), key=rewards.__getitem__)
    for place in dict.fromkeys((order[-1], order[0], len(items) - 1)):
        item = items[place]
        reward = digits(item.reward) if item.reward is not None else "none"
        excerpt = shortened(escaped(item.prompt), max(10, (width - 14) // 2), keeps_end=True)
        yield _line(f"{reward:>8}  {excerpt} → {escaped(item.completion)}")
