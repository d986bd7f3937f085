"""Find the model beside which a checkpoint without frozen weights was saved, and compare its weights by their hash."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.files.origin import files_fingerprint, locate


def recorded_base(manifest: Manifest) -> str | None:
    """Return the fingerprint of the weights that a run began with; None where its checkpoint has none."""
    mark = manifest.fingerprints.get("model", {}).get("model.path")
    return None if mark is None else str(json.loads(mark))


def located_base(checkpoint: str, manifest: Manifest, section: ModelConfig, base: Path, *, else_: str) -> Path:
    """Return the directory of the frozen weights that a checkpoint leaves out.

    Args:
        checkpoint: Its path, for the message.
        manifest: Its manifest.
        section: Names the model.
        base: Where its path begins, as in `locate`.
        else_: Sentences about what can be done without these weights.

    Raises:
        CheckpointMismatch: The weights are not there, or they are others.
    """
    recorded, found, reason = recorded_base(manifest), "absent", "model.path is not set"
    if section.path is not None:
        try:
            directory = locate(section.path, section, base, weights=True)
            found = files_fingerprint(directory)
            if found == recorded:
                return directory
            reason = f"other weights are in {directory}"
        except ModelError as error:
            reason = str(error).rstrip(".")
    saved_beside, here = (str(mark).rpartition("-")[2] for mark in (recorded, found))
    raise CheckpointMismatch(
        f"{checkpoint} holds trained parameters only (checkpoint.frozen: skip), and the frozen weights are those of "
        f"model.path: {section.path}. The hash of the weights that it was saved beside is {saved_beside}, the hash of "
        f"those here is {here} ({reason}). Nothing was changed. Put the weights back, or name their directory in "
        f"model.path. {else_} Checkpoints of a run with checkpoint.frozen: save hold the frozen weights too."
    )
