"""The data that trackers receive, by an allow-list: facts about a run, metrics, and completions as table rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.config.public import public_configuration
from holdfast.config.yaml12 import parse_file
from holdfast.files import read_json
from holdfast.text.escaping import escaped, escaped_paragraph
from holdfast.text.shortening import shortened

LONGEST_TEXT = 1000
"""Characters of a prompt or a completion in a table; the end of a longer one is kept, where the answer is."""
MOST_ROWS = 64
"""Completions of a step in a table; all of them are in samples.jsonl."""
COLUMNS = ("step", "prompt", "completion", "reward")


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker receives when it opens."""

    run_id: str
    """Identity of the run, the same after every resume."""
    name: str
    """Value of `run.name`."""
    folder: Path
    """Folder of this tracker, below the run's directory."""
    configuration: Mapping[str, Any]
    """Public keys of the configuration, nested as in YAML; empty if `metrics.track` leaves `configuration` out."""
    versions: Mapping[str, str]
    """Version of each library by its name; empty if `metrics.track` leaves `versions` out."""


class Backend(Protocol):
    """The protocol of a tracker.

    Of several values that are logged for the same step and name, the last counts.

    A class of a user is called with a `TrackedRun` and the keyword arguments of its section. It may leave out
    `completions`.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Args:
            step: Step of the run. It may repeat, and it goes back after a resume.
            metrics: Number of each metric by its name; NaN for a number that is not finite.
        """

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record completions of a step.

        Args:
            step: As in `write`.
            rows: At most 64 rows of `step`, `prompt`, `completion` and `reward`, which is None without a score. Of
                each text the last 1,000 characters are given.
        """

    def close(self, status: str) -> None:
        """Finish the record.

        Args:
            status: "finished", "failed", or "killed" if the run reported neither.
        """


def describe(directory: Path, folder: Path, allowed: set[str]) -> TrackedRun:
    """Return what a tracker of the run in a directory may know."""
    values = parse_file(directory / "config.resolved.yaml").values
    versions = read_json(directory / "versions.json") if "versions" in allowed else {}
    return TrackedRun(
        run_id=str(read_json(directory / "run.json")["run_id"]),
        name=str(values["run"]["name"]),
        folder=folder,
        configuration=public_configuration(values) if "configuration" in allowed else {},
        versions={str(name): escaped(str(version)) for name, version in versions.items()},
    )


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl by name; NaN where one is null or not finite."""
    numbers = {name: math.nan if value is None else value for name, value in line.items() if name != "step"}
    return {
        name: float(value) if math.isfinite(value) else math.nan
        for name, value in numbers.items()
        if isinstance(value, int | float)
    }


def completions_of(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of samples.jsonl, of one step, as rows of the table."""
    return [
        {
            "step": int(sample["step"]),
            **{name: _shown(str(sample.get(name, ""))) for name in ("prompt", "completion")},
            "reward": float(reward) if isinstance(reward := sample.get("reward"), int | float) else None,
        }
        for sample in samples[:MOST_ROWS]
    ]


def _shown(text: str) -> str:
    return shortened(escaped_paragraph(text), LONGEST_TEXT, keeps_end=True)
