"""What one sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, Protocol


class ProgressDisplay(Protocol):
    """Shows steps as they pass."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""

    def say(self, text: str) -> None:
        """Print a message without breaking the display."""

    def close(self) -> None:
        """Leave the screen as it is."""


def open_progress(
    kind: Literal["auto", "bar", "lines", "off"], total: int | None, first_step: int = 0
) -> ProgressDisplay:
    """Return the display that suits the terminal.

    Args:
        kind: `auto` is a bar on a terminal and lines elsewhere.
        total: Steps of the whole run, if known.
        first_step: Steps done before.
    """
    if kind == "off":
        return Silent()
    if kind == "bar" or (kind == "auto" and _is_interactive()):
        return Bar(total, first_step)
    return Lines(total)


def _is_interactive() -> bool:
    """Say whether a terminal shows this process's output, also where the launcher's pipe lies between."""
    from rich.console import Console

    return Console().is_interactive


def summary(metrics: Mapping[str, float]) -> str:
    """Return the few numbers worth a glance."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("reward", "reward", "{:.3f}"),
        ("kl", "kl", "{:.4f}"),
        ("divergence", "divergence", "{:.4f}"),
        ("entropy", "entropy", "{:.3f}"),
        ("entropy_estimate", "~entropy", "{:.3f}"),
        ("completions/mean_length", "length", "{:.0f}"),
        ("mean_token_accuracy", "accuracy", "{:.3f}"),
        ("grad_norm", "norm", "{:.3f}"),
        ("learning_rate", "lr", "{:.2e}"),
        ("throughput/tokens_per_second", "tok/s", "{:,.0f}"),
        ("throughput/mfu", "mfu", "{:.1%}"),
    ]
    hidden = {"entropy_estimate"} if "entropy" in metrics else set()
    visible = metrics.keys() - hidden
    return "  ".join(f"{label} {form.format(metrics[name])}" for name, label, form in shown if name in visible)


class Silent:
    """Shows nothing but messages."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Print the message."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """A line per step, at most one a second."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._last = float("-inf")
        self._first: tuple[int, float] | None = None
        """The first step that was seen, and when it had ended."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step if a second has passed, or if it is the first or the last."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        if now - self._last >= 1.0 or step == self._total:
            self._last = now
            of = f"/{self._total}" if self._total else ""
            print(f"step {step}{of}  {summary(metrics)}{self._left(step, now)}", flush=True)

    def _left(self, step: int, now: float) -> str:
        """Return the time that the steps to come take at the pace so far; "" before there is one, and at the end."""
        assert self._first is not None
        first, then = self._first
        if self._total is None or not first < step < self._total:
            return ""
        seconds = (now - then) / (step - first) * (self._total - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def say(self, text: str) -> None:
        """Print the message."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing."""


class Bar:
    """A bar with the step's numbers and the time that is left."""

    def __init__(self, total: int | None, first_step: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns: list[ProgressColumn] = [TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24)]
        columns += [
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        self._progress = RichProgress(*columns)
        self._task = self._progress.add_task("train", total=total, completed=first_step, numbers="")
        self._progress.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, numbers=summary(metrics))

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop redrawing."""
        self._progress.stop()
