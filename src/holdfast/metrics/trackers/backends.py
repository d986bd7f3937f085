"""Trackers that are files of ours, and the one that a user wrote. Each is opened in a process of its own."""

from __future__ import annotations

import csv
import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.escaping import escaped
from holdfast.files import load_module
from holdfast.metrics.sink import cut_torn_line
from holdfast.metrics.trackers.content import COLUMNS, TrackedRun, flat

REWIND = "event/rewind"
"""The metric that says at step N: what was logged for later steps is void, they are made again."""


class Backend(Protocol):
    """Where one tracker writes. The last value that it is given for a step and a name counts."""

    settle_seconds: float
    """After so long, what was written survives a kill of the process."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take numbers of a step; steps may come again, and go back."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take completions of a step as rows of `COLUMNS`."""

    def close(self, status: str) -> None:
        """Finish: `finished`, `failed`, or `killed` where the run did not say."""


class CsvTracker:
    """metrics.csv and completions.csv, one line a row, and run.json."""

    settle_seconds = 0.0

    def __init__(self, run: TrackedRun) -> None:
        about = {"run_id": run.run_id, "name": run.name, "versions": run.versions, "configuration": run.configuration}
        (run.folder / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._metrics = _Table(run.folder / "metrics.csv", ["step"])
        self._completions = _Table(run.folder / "completions.csv", list(COLUMNS))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; where a metric is new, the file gets its column first."""
        self._metrics.append({"step": step, **metrics})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002  a column has it
        """Append rows; line ends within texts are escaped, so that a kill tears one row at most."""
        for row in rows:
            self._completions.append(
                {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}
            )

    def close(self, status: str) -> None:
        """Do nothing: every row is on the disk."""


class _Table:
    """A CSV file whose columns may become more."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._path = path
        if path.exists() and cut_torn_line(path) > 0:
            with path.open(newline="", encoding="utf-8") as file:
                columns = next(csv.reader(file))
        else:
            path.write_text(_line(columns), encoding="utf-8", newline="")
        self._columns = columns

    def append(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_line(["" if row.get(name) is None else row[name] for name in self._columns]))

    def _widen(self, names: list[str]) -> None:
        temporary = self._path.with_suffix(".new")
        with (
            self._path.open(newline="", encoding="utf-8") as before,
            temporary.open("w", newline="", encoding="utf-8") as after,
        ):
            rows = csv.reader(before)
            after.write(_line(next(rows) + names))
            for row in rows:
                after.write(_line(row + [""] * len(names)))
        temporary.replace(self._path)
        self._columns = self._columns + names


def _line(values: Sequence[Any]) -> str:
    """Return one line of CSV; a kill between two writes leaves whole lines and at most one torn one."""
    texts = [str(value) for value in values]
    return ",".join('"' + text.replace('"', '""') + '"' if set(text) & set(',"') else text for text in texts) + "\n"


class TensorBoardTracker:
    """Event files in the run's tensorboard folder, made without torch."""

    settle_seconds = 0.0

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder))
        self._text("configuration", 0, json.dumps(run.configuration, indent=2))
        self._text("versions", 0, json.dumps(run.versions, indent=2))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric; after a rewind TensorBoard itself drops what it has of later steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if REWIND in metrics:
            self._add(step + 1, session_log=SessionLog(status=SessionLog.START))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))
        self._writer.flush()

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table in Markdown."""
        cells = [[str(row[name]).replace("|", "\\|").replace("\n", "<br>") for name in COLUMNS] for row in rows]
        lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        self._text("completions", step, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def _text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush and close."""
        self._writer.close()


class UserTracker:
    """A class of the user's: `write(step, metrics)` and `close(status)`; `completions(step, rows)` if it likes."""

    settle_seconds = 30.0

    def __init__(self, run: TrackedRun, file: Path, name: str, kwargs: Mapping[str, Any]) -> None:
        sys.path.append(str(file.parent))  # last, so that a sibling called random.py shadows nothing
        module = load_module(file, f"holdfast_tracker_{file.stem}")
        self._tracker = getattr(module, name)(run, **kwargs)
        self._takes_completions = callable(inspect.getattr_static(self._tracker, "completions", None))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand numbers on."""
        self._tracker.write(step, metrics)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand rows on where the class takes them."""
        if self._takes_completions:
            self._tracker.completions(step, rows)

    def close(self, status: str) -> None:
        """Hand the end on."""
        self._tracker.close(status)


def numbered(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as flat text by dotted path, for trackers that know no tree."""
    return {name: str(value) for name, value in flat(configuration).items()}
