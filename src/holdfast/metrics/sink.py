"""Sinks for metrics and completions. Every run writes metrics.jsonl.

Completions are written to one parquet file per step. A step that is repeated after a resume overwrites its file. Files
of later steps are removed when the run is opened, so that the folder always matches the run's present history.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holdfast.files import RegularFile, again, open_regular, parse_json, write_all

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
REWIND = "event/rewind"
"""The metric that tells trackers at step N that rows of later steps are void: a resume makes those steps again."""
BY_METRIC = "stop_when: "
"""Prefix of the reason in a run's last event if a metric ended it."""
BY_OBSERVER = "stopped by an observer"
"""The whole reason where an observer did: an end like any other, unlike a signal or a clock, after which the run
shall go on."""

_BLOCK = 1 << 16


class TrackerProcesses(Protocol):
    """The experiment trackers of a run, each in a process that cannot stop the run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a line of metrics; nothing waits for it."""

    def completions(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the completions of a step; nothing waits for them."""

    def news(self) -> list[str]:
        """Return messages about the trackers since the last call."""

    def close(self, status: str) -> list[str]:
        """End them; return how many rows each has lost. The status is `finished` or `failed`."""


class JsonlSink:
    """Appends one JSON object per line, always complete lines, so that readers may follow the file while it grows.

    Args:
        path: Path of the file. A torn line at its end, which an earlier start of the run left, is cut.
        first_step: Step that the run stands at; it is noted where an earlier start wrote lines here.
    """

    def __init__(self, path: Path, first_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.had_lines = path.exists() and again(lambda: cut_torn_line(path)) > 0
        """Whether an earlier start of the run wrote here."""
        self._file: RegularFile | None = self.opened()
        if self.had_lines and first_step is not None:
            self.event({"event": "rewind", "to": first_step})

    def opened(self) -> RegularFile:
        """Open the file for appending, without a buffer: what failed must not be written a second time later."""
        return RegularFile(self._path, "ab")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; numbers that JSON cannot hold become null."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.event({"step": step, **numbers})

    def event(self, values: Mapping[str, Any]) -> None:
        """Append any object; a file system in trouble is asked again, as it is for checkpoints.

        Raises:
            OSError: It stays in trouble, or the disk is full; the file is named, and holds no part of the line.
        """
        line = (json.dumps(values, separators=(",", ":")) + "\n").encode()
        again(lambda: self._append(line))

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = self.opened()
        try:
            write_all(self._file, line)
        except OSError:  # the next try opens it anew: a descriptor may be stale for good
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def cut_torn_line(path: Path) -> int:
    """Truncate a file after its last whole line, and return its size."""
    with RegularFile(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        newline = -1
        while end > 0 and newline < 0:  # from the end: the file of a long run has gigabytes
            start = file.seek(max(0, end - _BLOCK))
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
        if end < size:
            file.truncate(end)
    return end


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl that count: none that a resume went back behind, and no torn last one."""
    lines: list[dict[str, Any]] = []
    for line in _read_lines(path):
        if line.get("event") == "rewind":
            lines = [earlier for earlier in lines if earlier.get("step", 0) <= line["to"]]
        else:
            lines.append(line)
    return lines


def last_rewind(path: Path) -> int | None:
    """Return the step that a resume last went back to; None if there was none."""
    return next((line["to"] for line in reversed(_read_lines(path)) if line.get("event") == "rewind"), None)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    with open_regular(path) as file:
        text = file.read().decode("utf-8", errors="replace")
    for line in text.splitlines():
        try:
            lines.append(parse_json(line))
        except ValueError:
            break
    return lines


SAMPLE_FOLDER = "samples"
SAMPLE_IMAGES = "sample_images"
"""Folder of the images of prompts, small, which lines of completions name in `images`."""

_NAME = re.compile(r"\.?step-(\d+)\.parquet")
_WHOLE = {"step", "sample_id"}
_PARTS = "rewards"
"""The field whose values become columns of their own, `rewards/NAME`."""


class SampleFiles:
    """The folder of a run's completions."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Make the folder; in one that is there, remove what is torn or of later steps than `first_step`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for file in list(folder.iterdir()):
            match = _NAME.fullmatch(file.name)
            if match is not None and (file.name.startswith(".") or int(match[1]) > first_step):
                file.unlink()

    def write(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the completions of a step, whole or not at all.

        Raises:
            OSError: The disk is full or in trouble; the file is named.
        """
        data = _as_parquet(samples)
        path = self._folder / f"step-{samples[0]['step']:08d}.parquet"
        again(lambda: _replace(path, data))


def write_sample_images(folder: Path, images: Mapping[str, bytes]) -> None:
    """Write files of images by their names, which follow from what they hold.

    Raises:
        OSError: The disk is full or in trouble; the file is named.
    """
    for name, data in images.items():
        path = folder / name
        if not path.exists():
            folder.mkdir(exist_ok=True)
            again(partial(_replace, path, data))


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}")
    with RegularFile(unfinished, "wb") as file:
        write_all(file, data)
        file.sync()
    unfinished.replace(path)


def _as_parquet(samples: Sequence[Mapping[str, Any]]) -> bytes:
    from pyarrow import Table, schema  # type: ignore[import-untyped]  # has no stubs
    from pyarrow.parquet import write_table  # type: ignore[import-untyped]  # has no stubs

    rows = [_flat(sample) for sample in samples]
    columns = dict.fromkeys(name for row in rows for name in row)
    types = [(name, _type(name, [row.get(name) for row in rows])) for name in columns]
    table = Table.from_pylist([{name: row.get(name) for name in columns} for row in rows], schema=schema(types))
    buffer = io.BytesIO()
    write_table(table, buffer)
    return buffer.getvalue()


def _flat(sample: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in sample.items():
        if name == _PARTS:
            row |= {f"{_PARTS}/{reward}": number for reward, number in value.items()}
        else:
            # Half an emoji, which a prompt may hold, has no form in UTF-8.
            row[name] = value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
    return row


def _type(name: str, values: Sequence[Any]) -> str:
    """Return Arrow's name of a column's type; a column of nulls alone has numbers."""
    if name in _WHOLE:
        return "int64"
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {float, int}:
        return "float64"
    return "bool" if kinds == {bool} else "string"
