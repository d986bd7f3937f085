"""`holdfast watch`: shows a run in a terminal of 60 to 200 columns while it goes on. It never writes to the run.

A frame is drawn when a file of the run grew, at most every `_FRAME_SECONDS`; without a terminal one frame is printed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from holdfast.features.report.curves import Column
from holdfast.features.report.follow import Follower, RunStatus
from holdfast.features.report.metrics import EVALUATION, TIMING, leading, metric_label
from holdfast.features.report.sections import age, digits
from holdfast.files import size_words
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_LOOK_SECONDS, _FRAME_SECONDS, _IDLE_FRAME_SECONDS = 1.0, 2.0, 10.0
_TWO_COLUMNS = 110
"""Width from which two columns stand side by side."""
_MOST_CURVES, _LAST_STEPS = 7, 20
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_STYLES = {"running": "bold green", "done": "bold", "stopped": "bold yellow", "failed": "bold red"}
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
    follower = Follower(directory)
    follower.has_changed()
    status = follower.update()
    if not console.is_terminal:
        console.print(screen(status, console), soft_wrap=False)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        drawn = -math.inf
        while True:
            live.update(screen(status, console), refresh=True)
            drawn = time.monotonic()
            if status.state.name != "running":
                return
            _await(follower, drawn)
            status = follower.update()


def _await(follower: Follower, drawn: float) -> None:
    """Wait until a new frame is due."""
    changed = False
    while True:
        time.sleep(_LOOK_SECONDS)
        changed = follower.has_changed() or changed
        since = time.monotonic() - drawn
        if since >= (_FRAME_SECONDS if changed else _IDLE_FRAME_SECONDS):
            return


def screen(status: RunStatus, console: Console) -> RenderableType:
    """Return what is shown of a run."""
    from rich.console import Group
    from rich.table import Table

    width = console.width
    bars = _BARS if console.encoding.lower().startswith("utf") else _PLAIN_BARS
    head = [_head(status), _progress(status, min(width, 120), bars)]
    if width < _TWO_COLUMNS:
        return Group(*head, *_curves(status, width, bars), *_state_blocks(status), *_samples(status, width))
    left_width = width * 3 // 5 - 2
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=left_width)
    grid.add_column(width=width - left_width - 4)
    grid.add_row(Group(*_curves(status, left_width, bars)), Group(*_state_blocks(status)))
    return Group(*head, grid, *_samples(status, width))


def _head(status: RunStatus) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(status.name, "bold")
    line.append(f"  {status.verb}  ")
    line.append(status.state.name, _STYLES[status.state.name])
    if status.state.why:
        line.append(f": {escaped(status.state.why)}")
    return line


def _progress(status: RunStatus, width: int, bars: str) -> Text:
    """Return step, bar and the time that is left at the pace of the last steps."""
    from rich.text import Text

    step, total = status.curves.last or 0, status.total
    position = f"step {step:,}" + (f" of {total:,}" if total else "")
    ends = []
    if status.started is not None and status.state.name == "running":
        ends.append(f"{age(max(0.0, time.time() - status.started))} since the start")
    remaining = _remaining_seconds(status)
    if remaining is not None:
        ends.append(f"{age(remaining)} left")
    tail = "  ".join(ends)
    room = width - len(position) - len(tail) - 4
    line = Text(position, no_wrap=True, overflow="ellipsis")
    if total and room >= 8:
        done = min(room, round(room * step / total))
        glyph = "━" if bars is _BARS else "="
        line.append("  " + glyph * done, "green").append(
            (glyph if bars is _BARS else " ") * (room - done), "bright_black"
        )
    return line.append(f"  {tail}" if tail else "")


def _remaining_seconds(status: RunStatus) -> float | None:
    times = status.curves.columns.get("step_time")
    if status.state.name != "running" or not status.total or times is None or not times.values:
        return None
    pace = fmean(_finite(times.values[-_LAST_STEPS:]) or [0.0])
    since = max(0.0, time.time() - status.active) if status.active else 0.0
    return max(0.0, pace * (status.total - (status.curves.last or 0)) - min(since, pace))


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _grid() -> Table:
    from rich.table import Table

    return Table.grid(padding=(0, 1))


def _title(title: str) -> Text:
    from rich.text import Text

    return Text(f"\n{title}", "bold", no_wrap=True, overflow="ellipsis")


def _cell(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _curves(status: RunStatus, width: int, bars: str) -> Iterator[RenderableType]:
    """Yield the sparklines, and what the last steps were spent on."""
    columns = status.curves.columns
    names = [name for name in leading(columns) if name in columns][:_MOST_CURVES]
    names += [
        name for name in columns if name.startswith(EVALUATION) and name.endswith(("/accuracy", "/reward", "/loss"))
    ][:2]
    labels = [name if name.startswith(EVALUATION) else metric_label(name, status.verb).title for name in names]
    widest = min(max(map(len, labels), default=0), width // 3)
    grid = _grid()
    grid.add_column(width=widest)
    grid.add_column(justify="right", width=9)
    grid.add_column(width=max(8, width - widest - 12))
    for name, label in zip(names, labels, strict=True):
        values = columns[name].values
        grid.add_row(
            _cell(label),
            _cell(digits(values[-1])),
            _cell(sparkline(values, max(8, width - widest - 12), bars), "cyan"),
        )
    if not names:
        grid.add_row(_cell("no step yet"), _cell(""), _cell(""))
    yield _title("numbers")
    yield grid
    yield from _phases(columns, width, bars)


def _phases(columns: dict[str, Column], width: int, bars: str) -> Iterator[RenderableType]:
    """Yield the seconds of the phases: means over steps, or where not every step has a phase, over those that have."""
    timed = columns.get("step_time")
    of_steps = set(timed.steps[-_LAST_STEPS:]) if timed else set()
    means = {}
    for name, column in columns.items():
        if name.startswith(TIMING):
            label = name.removeprefix(TIMING)
            label += "" if of_steps.issubset(column.steps[-_LAST_STEPS:]) else ", each"
            means[label] = fmean(_finite(column.values[-_LAST_STEPS:]) or [0.0])
    if not means:
        return
    largest, room = max(means.values()) or 1.0, max(6, width - 34)
    grid = _grid()
    grid.add_column(width=20)
    grid.add_column(justify="right", width=10)
    grid.add_column(width=room)
    for name, seconds in sorted(means.items(), key=lambda pair: -pair[1])[:6]:
        bar = ("█" if bars is _BARS else "#") * round(room * seconds / largest)
        grid.add_row(_cell(escaped(name)), _cell(f"{1000 * seconds:,.1f} ms"), _cell(bar, "blue"))
    yield _title(f"phases, mean of the last {_LAST_STEPS} steps")
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


def _state_blocks(status: RunStatus) -> Iterator[RenderableType]:
    """Yield ranks, checkpoints and what went wrong."""
    yield from _ranks(status)
    yield from _checkpoints(status)
    yield from _health(status)


def _ranks(status: RunStatus) -> Iterator[RenderableType]:
    if not status.ranks:
        return
    yield _title("ranks")
    for rank_status in status.ranks[:16]:
        position = f"step {rank_status.step}  " if rank_status.step is not None else ""
        silent = rank_status.age > _SILENT_SECONDS
        ago = "a second ago" if rank_status.age < 2 else f"{age(rank_status.age)} ago"
        phase = rank_status.phase or "starting"
        yield _cell(
            f"rank {rank_status.rank}  {position}{phase}  {'SILENT, ' if silent else ''}{ago}",
            "red" if silent else "",
        )
    if len(status.ranks) > 16:
        silent_ranks = [rank_status.rank for rank_status in status.ranks[16:] if rank_status.age > _SILENT_SECONDS]
        yield _cell(f"and {len(status.ranks) - 16} more, {len(silent_ranks) or 'none'} of them silent")


def _checkpoints(status: RunStatus) -> Iterator[RenderableType]:
    yield _title("checkpoints")
    present = [line for line in status.checkpoints if line.is_there]
    if not present:
        yield _cell("none yet")
    for line in present[-3:]:
        size = "" if line.bytes_ is None else f"  {size_words(line.bytes_)}"
        seconds = "" if line.seconds is None else f"  {line.seconds:.2f} s"
        verified = "verified" if line.verified else "not noted as verified"
        yield _cell(f"step {line.step}{size}{seconds}  {verified}")


def _health(status: RunStatus) -> Iterator[RenderableType]:
    trouble = [mark for mark in status.marks if mark.kind in {"failed", "stopped", "resumed", "alarm"}]
    yield _title("health")
    if not trouble:
        yield _cell("no alarm, no failure")
    for mark in trouble[-4:]:
        style = {"failed": "red", "alarm": "yellow", "stopped": "yellow"}.get(mark.kind, "green")
        yield _cell(f"step {mark.step} {mark.kind}: {mark.text}", style)


def _samples(status: RunStatus, width: int) -> Iterator[RenderableType]:
    if not status.samples:
        return
    yield _title(f"completions of step {status.samples[-1].step}")
    scored = sorted(status.samples, key=lambda sample: -math.inf if sample.reward is None else sample.reward)
    for sample in dict.fromkeys(map(id, (scored[-1], scored[0], status.samples[-1]))):
        item = next(candidate for candidate in status.samples if id(candidate) == sample)
        reward = digits(item.reward) if item.reward is not None else "none"
        prompt = escaped(item.prompt)
        room = max(10, (width - 14) // 2)
        excerpt = shortened(prompt, room, keeps_end=True)
        yield _cell(f"{reward:>8}  {excerpt} → {escaped(item.completion)}")
