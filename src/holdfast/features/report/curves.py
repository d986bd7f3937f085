"""Reads the metrics of a run as columns: of the effective log, and of steps that were repeated after a resume.

A run of 100,000 steps has gigabytes as dictionaries and tens of megabytes as columns, which is why this does not use
`metrics.sink.read_metrics`; both leave out the same lines. A reader may follow the file while it grows.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from holdfast.files import RegularFile, parse_json
from holdfast.metrics.progress import End
from holdfast.text.escaping import escaped

BLOCK = 1 << 20


def finite_number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else, such as an integer of 400 digits."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_step(value: Any) -> TypeGuard[int]:
    """Return whether a value of a file can be a step: a whole number that the page's script can count with."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


@dataclass
class Column:
    """The values of one metric by step, in the order of the log; a value that is not a finite number is NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, step: int) -> Column | None:
        """Take off and return what comes after a step; None if nothing does."""
        index = bisect_right(self.steps, step)
        if index == len(self.steps):
            return None
        removed = Column(self.steps[index:], self.values[index:])
        del self.steps[index:], self.values[index:]
        return removed

    @property
    def total(self) -> float:
        """The sum of the finite values."""
        return sum(filter(math.isfinite, self.values))

    @property
    def not_finite(self) -> list[int]:
        """The steps without a finite value."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]


@dataclass(frozen=True)
class Rewind:
    """A start of the run that continued from a checkpoint."""

    last: int
    """The last step in the log before this start."""
    to: int
    """The step of the checkpoint. The steps between `to` and `last` were lost and made again."""


@dataclass
class Curves:
    """All metrics of a run, and the other facts in its metrics.jsonl."""

    columns: dict[str, Column] = field(default_factory=dict)
    lost: dict[str, list[Column]] = field(default_factory=dict)
    """Metric -> the columns of steps that were lost when a resume went back behind them."""
    rewinds: list[Rewind] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    """Steps of the effective log with an evaluation."""
    last: int | None = None
    """Step of the last line that counts."""
    unread: int = 0
    """Lines that are no JSON objects with a step."""

    def steps_at(self, end: End) -> int | None:
        """Return how many steps the run will have made at its end, as far as that is known by now."""
        epochs = self.columns.get("epoch")
        return end.expected(epochs.steps[-1], epochs.values[-1]) if epochs and epochs.steps else end.steps

    def add(self, line: Any) -> None:
        """Take a line of metrics.jsonl."""
        if isinstance(line, dict) and line.get("event") == "rewind" and is_step(line.get("to")):
            self._rewind(int(line["to"]))
        elif isinstance(line, dict) and is_step(line.get("step")):
            self._take(int(line["step"]), line)
        else:
            self.unread += 1

    def _take(self, step: int, line: Mapping[str, Any]) -> None:
        columns = self.columns
        evaluated = False
        for name, value in line.items():
            if name == "step" or not (value is None or isinstance(value, int | float)):
                continue
            column = columns.get(name)
            if column is None:
                column = columns.setdefault(escaped(name), Column())
            number = finite_number(value)
            column.steps.append(step)
            column.values.append(math.nan if number is None else number)
            evaluated = evaluated or name.startswith("eval/")
        if evaluated and self.evaluated[-1:] != [step]:
            self.evaluated.append(step)
        self.last = step

    def _rewind(self, step: int) -> None:
        self.rewinds.append(Rewind(step if self.last is None else self.last, step))
        for name, column in self.columns.items():
            removed = column.cut(step)
            if removed is not None:
                self.lost.setdefault(name, []).append(removed)
        self.evaluated = [evaluated_step for evaluated_step in self.evaluated if evaluated_step <= step]
        self.last = step if any(column.steps for column in self.columns.values()) else None


class LineReader:
    """Reads the lines that were appended to a file of JSON lines since the last read. An incomplete last line waits.

    Args:
        path: Path of the file.
        last_bytes: Number of bytes at the end of the file that the first read is limited to; None reads all of it.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self._path = path
        self._last_bytes = last_bytes
        self._offset = 0
        self._unfinished_line = b""

    def new(self, *, to_end: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield the offset of each new line and what it holds; None for one that is not JSON.

        Args:
            to_end: Nothing will follow, so a last line without an end is read as well.

        Raises:
            OSError: The file cannot be read.
        """
        if not self._path.exists():
            return
        with RegularFile(self._path) as file:
            self._begin(file)
            while block := file.read(BLOCK):
                start = self._offset - len(self._unfinished_line)
                self._offset += len(block)
                *lines, self._unfinished_line = (self._unfinished_line + block).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield start, parsed(line)
                    start += len(line) + 1
        if to_end and self._unfinished_line.strip():
            yield self._offset - len(self._unfinished_line), parsed(self._unfinished_line)

    def _begin(self, file: RegularFile) -> None:
        """Go to where the last look ended; at the first one, to the first whole line of what is to be read."""
        size = file.seek(0, 2)
        if size < self._offset:  # another file has its name now
            self._offset, self._unfinished_line = 0, b""
        if self._offset == 0 and self._last_bytes is not None and size > self._last_bytes:
            self._offset = file.seek(size - self._last_bytes)
            while block := file.read(BLOCK):
                if (end := block.find(b"\n")) >= 0:
                    self._offset += end + 1
                    break
                self._offset += len(block)
        file.seek(self._offset)

    @property
    def is_torn(self) -> bool:
        """Whether the file ends within a line."""
        return bool(self._unfinished_line.strip())


def parsed(line: bytes) -> Any:
    """Return what a line of JSON says; None for one that is none."""
    try:
        return parse_json(line)
    except (ValueError, UnicodeDecodeError):
        return None
