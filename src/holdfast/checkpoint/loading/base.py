"""Find the model beside which a checkpoint without frozen weights was saved, and compare its weights by their hash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.files.origin import files_fingerprint, locate
from holdfast.models.files.places import local_directory

BASE = "base"
"""Fingerprint of a checkpoint without frozen weights whose base was a local directory: `path`, its name in model.path,
and `directory`, its absolute path. Nothing is compared with it."""


def recorded_base(manifest: Manifest) -> str | None:
    """Return the fingerprint of the weights that a run began with; None where its checkpoint has none."""
    mark = manifest.fingerprints.get("model", {}).get("model.path")
    return None if mark is None else str(json.loads(mark))


def recorded_places(manifest: Manifest) -> Sequence[str]:
    """Return the directory that held the weights which a checkpoint leaves out; nothing where none was recorded."""
    directory = manifest.fingerprints.get(BASE, {}).get("directory")
    return () if directory is None else (str(directory),)


def located_base(  # noqa: PLR0913 - what is looked for, where, and what to say
    checkpoint: str, manifest: Manifest, section: ModelConfig, base: Path, *, advice: str, places: Sequence[str] = ()
) -> Path:
    """Return the directory of the frozen weights that a checkpoint leaves out.

    Args:
        checkpoint: Its path, for the message.
        manifest: Its manifest.
        section: Names the model.
        base: Where its path begins, as in `locate`.
        advice: Sentences about what can be done.
        places: Absolute paths of directories to look in before its path.

    Raises:
        CheckpointMismatch: The weights are not there, or they are others.
    """
    recorded, found, reasons = recorded_base(manifest), "absent", list[str]()
    for name in (*places, section.path):
        try:
            directory = _directory(name, manifest, section, base)
            found = files_fingerprint(directory)
            if found == recorded:
                return directory
            reasons.append(f"other weights are in {directory}")
        except ModelError as error:
            reasons.append(str(error).rstrip("."))
    saved_beside, here = (str(mark).rpartition("-")[2] for mark in (recorded, found))
    raise CheckpointMismatch(
        f"{checkpoint} holds trained parameters only (checkpoint.frozen: skip), and the frozen weights are those of "
        f"model.path: {section.path}. The hash of the weights that it was saved beside is {saved_beside}, the hash of "
        f"those here is {here} ({'; '.join(dict.fromkeys(reasons))}). Nothing was changed. Put the weights back, or "
        f"name their directory {advice} Checkpoints of a run with checkpoint.frozen: save hold the frozen weights too."
    )


def _directory(name: str | None, manifest: Manifest, section: ModelConfig, base: Path) -> Path:
    """Return the directory that a name means; no hub is asked for what was a local directory at the save.

    Raises:
        ModelError: There is none.
    """
    if name is None:
        raise ModelError("model.path is not set.")
    was_local = manifest.fingerprints.get(BASE, {}).get("path") == name
    if was_local and local_directory(name, base) is None:
        raise ModelError(f"there is no directory {name} in {Path.cwd()}, nor in {base.resolve()}.")
    return locate(name, section, base, weights=True)
