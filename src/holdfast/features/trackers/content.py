"""Selects the data that trackers receive: an allow-list of facts about a run, and completions as table rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The same after every resume."""
    name: str
    folder: Path
    """The tracker's own, below the run's directory."""
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]


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


def completion_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of samples.jsonl as a row of the table."""
    reward = sample.get("reward")
    return {
        "step": int(sample["step"]),
        "prompt": shortened(escaped_paragraph(str(sample.get("prompt", ""))), LONGEST_TEXT, keeps_end=True),
        "completion": shortened(escaped_paragraph(str(sample.get("completion", ""))), LONGEST_TEXT, keeps_end=True),
        "reward": float(reward) if isinstance(reward, int | float) else None,
    }


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Return nested values by dotted path."""
    pairs = (
        values.items()
        if isinstance(values, Mapping)
        else enumerate(values)
        if isinstance(values, list | tuple) and values
        else ()
    )
    if not pairs:
        return {path: values} if path else {}
    return {
        key: leaf for name, value in pairs for key, leaf in flat(value, f"{path}.{name}" if path else str(name)).items()
    }
