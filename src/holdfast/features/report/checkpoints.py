"""Lists the checkpoints of a run from the manifests on the disk and the record of deletions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.features.report.curves import finite_number
from holdfast.files import read_json
from holdfast.training.directory import CHECKPOINTS

MANIFEST = "manifest.json"
"""As `checkpoint.format.manifest` has it; repeated here because that package imports torch."""


@dataclass(frozen=True)
class CheckpointLine:
    """One checkpoint."""

    step: int
    bytes_: int | None
    """Size of all files; None where it is not recorded."""
    seconds: float | None
    """Duration of its save."""
    verified: bool
    """Whether the run noted that every byte was read back; nothing is hashed again here."""
    is_there: bool
    """Whether its manifest is on the disk now."""
    resumes: str
    """A phrase: on how many ranks it resumes, and how exactly."""


def checkpoint_lines(
    directory: Path, events: Sequence[Mapping[str, Any]], storage: str | None
) -> tuple[list[CheckpointLine], str]:
    """Return a run's checkpoints by step, and a sentence where not all of them can be seen.

    Args:
        directory: Of the run.
        events: Of its events.jsonl.
        storage: checkpoint.storage; None for the run's own directory.
    """
    saves = {
        event["saved"]: event
        for event in events
        if event.get("event") == "checkpoint" and isinstance(event.get("saved"), int)
    }
    folder = Path((storage or str(directory / CHECKPOINTS)).removeprefix("file://"))
    remote = storage is not None and "://" in storage and not storage.startswith("file://")
    manifests = {} if remote else _manifests(folder)
    lines = [_line(step, saves.get(step), manifests.get(step)) for step in sorted(saves.keys() | manifests.keys())]
    note = (
        "They lie in an object store, which this page does not ask: what is deleted there is not shown."
        if remote
        else ""
    )
    return lines, note


def _manifests(folder: Path) -> dict[int, Mapping[str, Any]]:
    manifests: dict[int, Mapping[str, Any]] = {}
    try:
        paths = sorted(folder.glob(f"step-*/{MANIFEST}"))
    except OSError:
        return manifests
    for path in paths:
        number = path.parent.name.removeprefix("step-")
        if not number.isdecimal():
            continue
        try:
            values = read_json(path)["manifest"]
            manifests[int(number)] = values if isinstance(values, dict) else {}
        except (OSError, ValueError, KeyError, TypeError):
            manifests[int(number)] = {}
    return manifests


def _line(step: int, event: Mapping[str, Any] | None, manifest: Mapping[str, Any] | None) -> CheckpointLine:
    size = None if event is None else event.get("bytes")
    seconds = None if event is None else event.get("seconds")
    if manifest and not isinstance(size, int):
        files = manifest.get("files")
        size = sum(file["size"] for file in files.values()) if isinstance(files, dict) else None
    return CheckpointLine(
        step,
        size if isinstance(size, int) else None,
        finite_number(seconds),
        event is not None,
        manifest is not None,
        "" if manifest is None else _resumes(manifest),
    )


def _resumes(manifest: Mapping[str, Any]) -> str:
    """Return what a checkpoint lets a run go on on, as docs/checkpoints.md says."""
    mesh, contents = manifest.get("mesh"), manifest.get("contents")
    if not manifest:
        return "its manifest is damaged"
    if not isinstance(contents, list) or "optimizer" not in contents:
        return "weights only: a new run can start from it"
    ranks = mesh.get("replicate", 1) * mesh.get("shard", 1) if isinstance(mesh, dict) else None
    if ranks is None or "rank" not in contents:
        return "any number of ranks"
    return f"bit for bit on {ranks} rank{'s' * (ranks != 1)}; any number of others"
