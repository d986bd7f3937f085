"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from rich.text import Text


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


class ProgressDisplay(Protocol):
    """Shows steps as they pass."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step."""

    def say(self, text: str) -> None:
        """Print a message without breaking the display."""

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
        return SilentDisplay()
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


def summary(metrics: Mapping[str, float]) -> str:
    """Return the few numbers worth a glance."""
    return "  ".join(_written(metrics).values())


def _print(text: str) -> None:
    print(text, flush=True)


class SilentDisplay:
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
            self._write(f"step {step}{of}  {summary(metrics)}{self._left(step, timestamp)}")

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

    def close(self) -> None:
        """Do nothing."""


class LoggedDisplay:
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


class Bar:
    """A line that is redrawn: the step, a progress bar, the metrics and the time left.

    A narrow terminal shows fewer metrics; the main metric of the command and the time left are dropped last.
    """

    def __init__(self, end: End, first_step: int, verb: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        self._end, self._total = end, end.steps
        self._first, self._step = first_step, first_step
        self._began = time.monotonic()
        self._seen: tuple[int, float] | None = None
        """The first step that was seen, and when it had ended: what comes before the first steps is no pace."""
        self._ended = self._began
        self._ranks = tuple(dict.fromkeys((*_MAIN.get(verb, ()), *_RANKS)))
        self._numbers: dict[str, str] = {}
        self._widths: dict[str, int] = {}
        """The longest text of each number so far, so that the line keeps its places."""
        # Without soft_wrap, messages are broken at the width of the terminal, and so into the log.
        self._console = Console(soft_wrap=True)
        self._live = Live(console=self._console, get_renderable=self._frame)
        self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        self._numbers = _written(metrics)
        for name, text in self._numbers.items():
            self._widths[name] = max(self._widths.get(name, 0), len(text))
        self._step, self._ended = step, time.monotonic()
        self._total = self._end.expected(step, metrics.get("epoch", 0.0))
        self._seen = self._seen or (step, self._ended)
        if step == self._total:
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop redrawing."""
        self._live.stop()

    def _frame(self) -> Text:
        from rich.text import Text

        numbers = {name: text.ljust(self._widths[name]) for name, text in self._numbers.items()}
        line = fitted_frame(self._times(), numbers, self._ranks, bool(self._total), self._console.width)
        done = round(line.bar * min(self._step / self._total, 1.0)) if self._total else 0
        glyph = "━" if self._console.encoding.lower().startswith("utf") else "="
        # Without colours what is to come would look like what is done.
        remaining_glyph = " " if self._console.color_system is None or self._console.no_color else glyph
        bar = (glyph * done, "bar.complete"), (remaining_glyph * (line.bar - done), "bar.back")
        return Text.assemble(line.before, *bar, line.after)

    def _times(self) -> Times:
        of = "" if self._total is None else f"/{self._total}"
        elapsed = timedelta(seconds=int(time.monotonic() - self._began))
        return Times(f"step {self._step:>{len(of) - 1 if of else 1}}{of}", str(elapsed), self._left())

    def _left(self) -> str:
        """Return the time that the steps to come take at the pace so far, counted down within a step."""
        if self._total is None:
            return ""
        if self._step >= self._total:
            return "left 0:00:00"
        if self._seen is None or self._step == self._seen[0]:
            return "left -:--:--"
        first, first_time = self._seen
        pace = (self._ended - first_time) / (self._step - first)
        seconds = pace * (self._total - self._step) - min(time.monotonic() - self._ended, pace)
        return f"left {timedelta(seconds=round(seconds))}"


class Times(NamedTuple):
    """What stands around the numbers of a bar's line."""

    step: str
    elapsed: str
    remaining: str


_SHORTEST_BAR, _LONGEST_BAR = 8, 24


def fitted_frame(times: Times, numbers: Mapping[str, str], ranks: Sequence[str], has_bar: bool, width: int) -> Frame:
    """Return the parts of a bar's line that fit into a width.

    The step stands there always. What else there is comes by rank: the first number, the time left, the second number,
    the bar, the third number, the time since the start, and the others, up to the first that has no room.

    Args:
        times: What stands around the numbers.
        numbers: Their texts, in the order in which they are shown.
        ranks: Of the numbers, the most important first.
        has_bar: Whether there is one; not where the number of steps is not known.
        width: Columns.
    """
    room = width - len(times.step)
    fitting = set()
    for name, size in _sizes(times, numbers, ranks, has_bar).items():
        if size > room:
            break
        room -= size
        fitting.add(name)
    numbers_text = "".join(f"  {text}" for name, text in numbers.items() if name in fitting)
    ends = times.elapsed if _ELAPSED in fitting else "", times.remaining if _LEFT in fitting else ""
    ending = " ".join(end for end in ends if end)
    bar = min(_LONGEST_BAR, _SHORTEST_BAR + room) if _BAR in fitting else 0
    return Frame(times.step + " " * bool(bar), bar, numbers_text + (f"  {ending}" if ending else ""))


_BAR, _ELAPSED, _LEFT = " bar", " elapsed", " left"
"""Names that no number has."""


def _sizes(times: Times, numbers: Mapping[str, str], ranks: Sequence[str], has_bar: bool) -> dict[str, int]:
    """Return the columns that each part takes with the blanks before it, by rank."""
    sizes = [(name, 2 + len(numbers[name])) for name in ranks if name in numbers]
    bar = [(_BAR, 1 + _SHORTEST_BAR)] if has_bar else []
    time_left = [(_LEFT, 2 + len(times.remaining))] if times.remaining else []
    elapsed = (_ELAPSED, 2 - len(time_left) + len(times.elapsed))
    return dict([*sizes[:1], *time_left, *sizes[1:2], *bar, *sizes[2:3], elapsed, *sizes[3:]])


class Frame(NamedTuple):
    """A bar's line."""

    before: str
    bar: int
    """Columns of the bar itself."""
    after: str
