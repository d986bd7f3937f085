"""Files of recorded steps: rollouts/step-N.jsonl.gz, a line about the step and one for each of its groups."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.place.layout import step_name
from holdfast.errors import ConfigError
from holdfast.files import open_regular, parse_json

if TYPE_CHECKING:
    from holdfast.checkpoint.place.storage import Storage

_FOLDER = "rollouts"
DAMAGES = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError)
"""Exceptions of reading a file that is torn, or has not what `recorder.record` writes."""


def record_path(directory: Path, step: int) -> Path:
    """Return where a run keeps a step."""
    return directory / _FOLDER / f"step-{step:08d}.jsonl.gz"


def record_paths(directory: Path) -> list[Path]:
    """Return the steps that a run kept, in their order."""
    return sorted((directory / _FOLDER).glob("step-*.jsonl.gz"))


def check_recorded(directory: Path, step: int) -> None:
    """Refuse a step that was not kept.

    Raises:
        ConfigError: It was not; the message names the steps that were.
    """
    path = record_path(directory, step)
    if not path.exists():
        steps = [int(kept.name[5:13]) for kept in record_paths(directory)]
        existing = f"kept are steps {steps[0]} to {steps[-1]}" if steps else "none was kept; set rollout.record: true"
        raise ConfigError(f"{path} does not exist: {existing}.")


def is_kept(storage: Storage, step: int) -> bool:
    """Return whether there is a checkpoint of a step; the start of a run needs none."""
    return step == 0 or storage.exists(step_name(step))


def record_lines(path: Path) -> list[Any]:
    """Return a file's lines; raises one of `DAMAGES`."""
    with open_regular(path) as packed, gzip.open(packed, "rt", encoding="utf-8") as file:
        return [parse_json(line) for line in file]
