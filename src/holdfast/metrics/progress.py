"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


class End(NamedTuple):
    """The end of a run, in steps or in passes over the data."""

    steps: int | None = None
    """Steps of the whole run, if known."""
    epochs: float | None = None
    """Passes over the data, if it makes so many."""

    def expected(self, step: int, epoch: float) -> int | None:
        """Return how many steps the run will have made at its end, at the steps per pass so far; None if unknown.

        Args:
            step: Done.
            epoch: Passes that they made.
        """
        if self.epochs is None or not step or not 0 < epoch < math.inf:
            return self.steps
        # Passes are fractions: a quotient of them is a little above or below a whole number.
        by_epochs = max(step, math.ceil(round(step * self.epochs / epoch, 6)))
        return by_epochs if self.steps is None else min(self.steps, by_epochs)


class ProgressDisplay:
    """Shows messages, and of the steps nothing; other displays show steps too."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""

    def say(self, text: str) -> None:
        """Print a message without breaking the display."""
        _print(text)

    def close(self) -> None:
        """Leave the screen as it is."""


def open_progress(
    kind: Literal["auto", "bar", "lines", "off"], end: End, first_step: int = 0, verb: str = ""
) -> ProgressDisplay:
    """Return the display that suits the terminal.

    Args:
        kind: `auto` is a bar on a terminal and lines elsewhere.
        end: Of the run.
        first_step: Steps done before.
        verb: Whose numbers stay longest where a terminal is narrow.
    """
    if kind == "off":
        return ProgressDisplay()
    if kind == "bar" or (kind == "auto" and terminal_width() is not None):
        return Bar(end, first_step, verb)
    return Lines(end)


def terminal_width() -> int | None:
    """Return the columns of the terminal that shows this process's output, also where the launcher's pipe lies between.

    None where there is no terminal.
    """
    from rich.console import Console

    console = Console()
    return console.width if console.is_interactive else None


_NUMBERS = {
    "loss": ("loss", "{:.4f}"),
    "reward": ("reward", "{:.3f}"),
    "rewards/margins": ("margin", "{:.3f}"),
    "rewards/accuracies": ("accuracy", "{:.3f}"),
    "kl": ("kl", "{:.4f}"),
    "divergence": ("divergence", "{:.4f}"),
    "entropy": ("entropy", "{:.3f}"),
    "entropy_estimate": ("~entropy", "{:.3f}"),
    "completions/mean_length": ("length", "{:.0f}"),
    "mean_token_accuracy": ("accuracy", "{:.3f}"),
    "grad_norm": ("norm", "{:.3f}"),
    "learning_rate": ("lr", "{:.2e}"),
    "throughput/tokens_per_second": ("tok/s", "{:,.0f}"),
    "throughput/mfu": ("mfu", "{:.1%}"),
}
"""The numbers worth a glance, in the order of a line: metric -> label and form."""
_MAIN = {
    "sft": ("loss", "mean_token_accuracy"),
    "dpo": ("rewards/margins", "rewards/accuracies"),
    "reward": ("loss", "rewards/accuracies"),
    "grpo": ("reward", "completions/mean_length"),
    "distill": ("loss", "divergence"),
}
"""By verb, the two that people look at; the others follow them in `_RANKS` where there is room."""
_RANKS = (
    "loss", "throughput/tokens_per_second", "kl", "grad_norm", "learning_rate", "throughput/mfu", *_NUMBERS,
)  # fmt: skip


def _written(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the text of each number that there is, in the order of a line."""
    hidden = {"entropy_estimate"} if "entropy" in metrics else set()
    visible = metrics.keys() - hidden
    return {
        name: f"{label} {form.format(metrics[name])}" for name, (label, form) in _NUMBERS.items() if name in visible
    }


def _print(text: str) -> None:
    print(text, flush=True)


class Lines(ProgressDisplay):
    """A line per step, at most one a second."""

    def __init__(self, end: End, write: Callable[[str], None] = _print) -> None:
        self._end, self._total = end, end.steps
        self._write = write
        self._last = float("-inf")
        self._first: tuple[int, float] | None = None
        """The first step that was seen, and when it had ended."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step if a second has passed, or if it is the first or the last."""
        timestamp = time.monotonic()
        self._total = self._end.expected(step, metrics.get("epoch", 0.0))
        self._first = self._first or (step, timestamp)
        if timestamp - self._last >= 1.0 or step == self._total:
            self._last = timestamp
            of = f"/{self._total}" if self._total else ""
            self._write(f"step {step}{of}  {'  '.join(_written(metrics).values())}{self._left(step, timestamp)}")

    def _left(self, step: int, timestamp: float) -> str:
        """Return the time that the steps to come take at the pace so far; "" before there is one, and at the end."""
        assert self._first is not None
        first, first_time = self._first
        if self._total is None or not first < step < self._total:
            return ""
        seconds = (timestamp - first_time) / (step - first) * (self._total - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def say(self, text: str) -> None:
        """Print the message."""
        self._write(text)


class LoggedDisplay(ProgressDisplay):
    """A display whose steps are also written as lines elsewhere.

    Args:
        display: The display that people see.
        end: Of the run.
        write: Takes a line.
        with_messages: Whether messages become lines there too; False where what is printed gets there by itself.
    """

    def __init__(
        self, display: ProgressDisplay, end: End, write: Callable[[str], None], *, with_messages: bool
    ) -> None:
        self._shown = display
        self._lines = Lines(end, write)
        self._with_messages = with_messages

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, and write it as `Lines` does."""
        self._shown.update(step, metrics)
        self._lines.update(step, metrics)

    def say(self, text: str) -> None:
        """Print the message."""
        self._shown.say(text)
        if self._with_messages:
            self._lines.say(text)

    def close(self) -> None:
        """Leave the screen as it is."""
        self._shown.close()


class Bar(ProgressDisplay):
    """A line that rich redraws: the step, a bar, the metrics, the time since the start and the time left.

    A narrow terminal shows fewer metrics; the main metric of the command and the time left are dropped last.
    """

    def __init__(self, end: End, first_step: int, verb: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        self._end = end
        self._ranks = tuple(dict.fromkeys((*_MAIN.get(verb, ()), *_RANKS)))
        self._widths: dict[str, int] = {}
        """The longest text of each number so far, so that the line keeps its places."""
        whole = Column(no_wrap=True)
        self._parts: dict[str, list[str | ProgressColumn]] = {
            "step": [TextColumn("{task.description}")],
            "bar": [BarColumn(_LONGEST_BAR)],
            "numbers": [TextColumn("{task.fields[numbers]}")],
            "elapsed": [TimeElapsedColumn(table_column=whole)],
            "left": ["left", TimeRemainingColumn(table_column=whole)],
        }
        # Without soft_wrap, messages are broken at the width of the terminal, and so into the log. The estimate is by
        # all steps: one step of a policy may take longer than the 30 seconds that rich looks at.
        console = Console(soft_wrap=True)
        self._progress = Progress(console=console, refresh_per_second=4, speed_estimate_period=math.inf)
        self._progress.add_task("", total=end.steps, completed=first_step)
        (self._task,) = self._progress.tasks
        self._show(first_step, {})
        self._progress.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        # Not by `Progress.update`, which forgets the pace when the total changes.
        self._task.total = self._end.expected(step, metrics.get("epoch", 0.0))
        self._show(step, _written(metrics))
        if step == self._task.total:
            self._progress.refresh()

    def _show(self, step: int, numbers: Mapping[str, str]) -> None:
        total = self._task.total
        self._widths |= {name: max(self._widths.get(name, 0), len(text)) for name, text in numbers.items()}
        sizes = {name: 2 + self._widths[name] for name in self._ranks if name in numbers}
        step_text = f"step {step:>{len(str(total))}}/{total}" if total else f"step {step}"
        times = {"elapsed": len(str(timedelta(seconds=int(self._task.elapsed or 0))))}
        if total:
            times["left"] = len(_duration(self._task.time_remaining or 0))
        fitting = fitting_parts(sizes, self._progress.console.width - len(step_text), times)
        self._progress.columns = tuple(
            column for part, columns in self._parts.items() if part in {"step", *fitting} for column in columns
        )
        written = (f" {text.ljust(self._widths[name])}" for name, text in numbers.items() if name in fitting)
        self._progress.update(self._task.id, completed=step, description=step_text, numbers=" ".join(written))

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, emoji=False)

    def close(self) -> None:
        """Stop redrawing."""
        self._progress.stop()


_SHORTEST_BAR, _LONGEST_BAR = 8, 24


def _duration(seconds: float) -> str:
    """Return a time left as rich writes it."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def fitting_parts(numbers: Mapping[str, int], room: int, times: Mapping[str, int]) -> set[str]:
    """Return the parts of a line that fit beside the step: `bar`, `left`, `elapsed` and names of numbers.

    They come by rank: the first number, the time left, the second number, the bar, the third number, the time since the
    start, and the others, up to the first that has no room.

    Args:
        numbers: The columns of each with the blanks before it, the most important first.
        room: Columns.
        times: The columns of the time since the start, `elapsed`, and of the time `left`, if the number of steps is
            known: then there is a bar, too.
    """
    ranked = list(numbers.items())
    left = [("left", len(" left ") + times["left"])] if "left" in times else []
    bar = [("bar", 1 + _SHORTEST_BAR)] if "left" in times else []
    sizes = [*ranked[:1], *left, *ranked[1:2], *bar, *ranked[2:3], ("elapsed", 1 + times["elapsed"]), *ranked[3:]]
    ends = accumulate(size for _, size in sizes)
    fitting = {name for (name, _), end in zip(sizes, ends, strict=True) if end <= room}
    return fitting | {"numbers"} if fitting & numbers.keys() else fitting
