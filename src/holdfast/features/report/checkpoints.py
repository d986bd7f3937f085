"""Lists the checkpoints of a run from the manifests on the disk and the record of deletions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.features.report.curves import finite_number, is_step
from holdfast.features.report.formats import counted
from holdfast.files import read_json
from holdfast.training.directory import CHECKPOINTS

MANIFEST = "manifest.json"
"""As `checkpoint.format.manifest` has it; repeated here because that package imports torch."""


@dataclass(frozen=True)
class CheckpointLine:
    """One checkpoint."""

    step: int
    bytes_: float | None
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
        event["saved"]: event for event in events if event.get("event") == "checkpoint" and is_step(event.get("saved"))
    }
    folder = Path((storage or str(directory / CHECKPOINTS)).removeprefix("file://"))
    if storage is not None and "://" in storage.removeprefix("file://"):
        manifests: dict[int, Mapping[str, Any]] = {}
        note = "They lie in an object store, which this page does not ask: what is deleted there is not shown."
    else:
        manifests, note = _manifests(folder), ""
    return [_line(step, saves.get(step), manifests.get(step)) for step in sorted(saves.keys() | manifests.keys())], note


def _manifests(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the manifests by step; {} for one that is damaged."""
    manifests: dict[int, Mapping[str, Any]] = {}
    with suppress(OSError):
        for path in folder.glob(f"step-*/{MANIFEST}"):
            number = path.parent.name.removeprefix("step-")
            if number.isdecimal() and is_step(int(number)):
                manifests[int(number)] = {}
                with suppress(OSError, ValueError, KeyError, TypeError):
                    manifests[int(number)] = dict(read_json(path)["manifest"])
    return manifests


def _line(step: int, event: Mapping[str, Any] | None, manifest: Mapping[str, Any] | None) -> CheckpointLine:
    size, seconds = (finite_number((event or {}).get(key)) for key in ("bytes", "seconds"))
    if manifest and size is None:
        with suppress(AttributeError, KeyError, TypeError):
            size = finite_number(sum(file["size"] for file in manifest["files"].values()))
    resumes = "" if manifest is None else _resumes(manifest)
    return CheckpointLine(step, size, seconds, event is not None, manifest is not None, resumes)


def _resumes(manifest: Mapping[str, Any]) -> str:
    """Return what a checkpoint lets a run go on on, as docs/checkpoints.md says."""
    mesh, contents = manifest.get("mesh"), manifest.get("contents")
    if not manifest:
        return "its manifest is damaged"
    if not isinstance(contents, list) or "optimizer" not in contents:
        return "weights only: a new run can start from it"
    sizes = [mesh.get("replicate", 1), mesh.get("shard", 1)] if isinstance(mesh, dict) else []
    if not sizes or not all(map(is_step, sizes)) or "rank" not in contents:
        return "any number of ranks"
    return f"bit for bit on {counted(sizes[0] * sizes[1], 'rank')}; any number of others"
