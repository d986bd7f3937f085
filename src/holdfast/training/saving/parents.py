"""Identify what a run starts from: the model and adapters, and the run and step of which they are exports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast.checkpoint.export.about import check_weights, read_about
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.config.base import LEFT_OUT
from holdfast.config.public import without_password
from holdfast.models.files.origin import locate
from holdfast.training import directory
from holdfast.training.run import ConfiguredRun, Training


def notes_of_exports(setting: ConfiguredRun, model: Path | None, *, whole: bool = False) -> list[str]:
    """Return a line for each export that a model is loaded from, which says whose and of which step it is.

    Args:
        setting: Of the run.
        model: Directory of the model; None for one that lies in no files.
        whole: Read every byte of the weights, rather than compare sizes.

    Raises:
        ModelError: Weights are others than the export says.
    """
    lines = []
    for key, path in _model_paths(setting, model).items():
        exported = read_about(path)
        if exported is not None:
            check_weights(path, exported, by_hash=whole)
            lines.append(f"{key} is an export of {exported.words}")
    return lines


def _model_paths(setting: ConfiguredRun, model: Path | None) -> dict[str, Path]:
    paths = {} if model is None else {"model.path": model}
    section = setting.config.model
    if section.lora is not None and section.lora.path is not None:
        paths["model.lora.path"] = locate(section.lora.path, section, setting.base, weights=True)
    return paths


def evaluated_model(setting: ConfiguredRun, model: Path | None) -> tuple[str, dict[str, Any]]:
    """Return a name for files about the model that is evaluated, other than any other model's, and what it is.

    It is that of the run and step of an export; other models have that of their directory and a hash of where it lies.

    Args:
        setting: Of the evaluation.
        model: Directory of the model; None for one that lies in no files.
    """
    paths = _model_paths(setting, model)
    identities = {key: _identity(path) for key, path in paths.items()}
    name = setting.config.model.path
    about = {"model": None if name is None else recordable(name), "exports": identities}
    if not paths:
        return "untrained", about
    key, path = list(paths.items())[-1]  # adapters say more than the model that they adapt
    identity = identities[key]
    if identity is None:
        return f"{_plain_name(path.name)}-{hash_bytes(str(path.resolve()).encode())[:8]}", about
    return f"{_plain_name(identity['run'])}-step-{identity['step']:08d}-{identity['weights'][:8]}", about


def _plain_name(name: str) -> str:
    return re.sub(r"[^\w-]+", "_", name, flags=re.ASCII)[:80] or "model"


def parent_of(training: Training) -> dict[str, Any] | None:
    """Return what a run started from, as run.json has it, or will have it; None where it starts from nothing."""
    if directory.is_run(training.run.directory) and not directory.is_blank(training.run.directory):
        return directory.parent(training.run.directory)
    section, checkpoint = training.run.config.model, training.run.config.checkpoint
    parent: dict[str, Any] = {}
    if section.path is not None:
        parent = {"model": recordable(section.path), "export": _identity(training.model.blueprint.directory)}
        if section.lora is not None and section.lora.path is not None:
            adapter_path = Path(section.lora.path)
            parent |= {
                "adapters": recordable(section.lora.path),
                "adapters_export": _identity(adapter_path if adapter_path.is_dir() else None),
            }
    if checkpoint.init_from is not None:
        parent["init_from"] = recordable(checkpoint.init_from.path)
    if isinstance(checkpoint.resume.start, str):
        parent["resume_from"] = recordable(checkpoint.resume.start)
    return parent or None


def recordable(text: str) -> str:
    """Return a path or an address as records may have it: without user, password and query."""
    return without_password(text) or LEFT_OUT


def _identity(path: Path | None) -> dict[str, Any] | None:
    exported = None if path is None else read_about(path)
    return None if exported is None else exported.identity
