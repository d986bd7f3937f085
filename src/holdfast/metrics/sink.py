"""Where metrics go. A sink takes a step's numbers; the first one is always metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives metrics on rank 0."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        ...


class JsonlSink:
    """One JSON object per line, complete lines only: a reader may follow the file while it grows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; numbers that JSON cannot hold become null."""
        self.event({"step": step, **{name: _plain(value) for name, value in metrics.items()}})

    def event(self, values: Mapping[str, Any]) -> None:
        """Append any object."""
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without a torn last one."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
