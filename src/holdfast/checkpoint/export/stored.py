"""Export a model directory or a torch file from a stored checkpoint in one process, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable, NoCheckpoint
from holdfast.checkpoint.export.about import Exported
from holdfast.checkpoint.export.adapters import Description, write_adapters
from holdfast.checkpoint.export.assets import ExportFailed
from holdfast.checkpoint.export.card import Papers, card_of
from holdfast.checkpoint.export.frozen import frozen_weights
from holdfast.checkpoint.export.write import (
    check_outside,
    check_target,
    model_weights,
    sync_directory,
    write_export,
)
from holdfast.checkpoint.format.settings import settings_of
from holdfast.checkpoint.format.snapshot import MODEL, OPTIM
from holdfast.checkpoint.inspect.tensors import ModelTensors, StoredCheckpoint
from holdfast.checkpoint.loading.wrapped_state import records
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.checkpoint.place.layout import ASSETS, STAGING
from holdfast.checkpoint.place.storage import rename_new
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.public import WHOLE, public_configuration
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.roots import verb_of
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError
from holdfast.files import read_json
from holdfast.models.adapters.files import modules_in
from holdfast.models.adapters.live import Join, joins_of
from holdfast.models.adapters.lora import add_adapters
from holdfast.models.files.conversion import Header
from holdfast.models.setup.model import Blueprint, described, storage_of
from holdfast.optim.tagged_json import decode
from holdfast.optim.wrapped import BETWEEN
from holdfast.parallel.collectives import RankGroup

STORED_HEADERS = "stored_headers.json"
"""File with names and shapes of the original weights; an export gives tensors these names again."""

ADAPTERS = "adapters.json"
"""What is written of a run's adapters beside their tensors."""

PARENT = "parent.json"
"""What the run started from."""


def export_stored(  # noqa: PLR0913 - what is written, from where, and how
    checkpoints: Sequence[StoredCheckpoint],
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    largest_file_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    averaged: bool = False,
    base: Path | None = None,
) -> None:
    """Write a directory that plain transformers loads, from one checkpoint or the mean of several.

    Args:
        checkpoints: Of the same model.
        directory: Replaced if it exists.
        dtype: Cast floating-point tensors to this; None keeps them as stored.
        largest_file_bytes: Weights are spread over files of at most this size.
        trust_remote_code: Whether Python code that lies in the checkpoint may be run, where its model needs some.
        averaged: Write the averages of the weights that the run kept, in the dtype of the weights.
        base: The directory of frozen weights that the checkpoints leave out; None looks where the run read them.

    Raises:
        ConfigError: The model needs code of its own, and that was not allowed; or the directory cannot be written.
        CheckpointCorrupt: A tensor's bytes are not those that were saved.
        CheckpointMismatch: The checkpoints hold different models, or leave out weights that are not found.
        NoCheckpoint: The checkpoint lacks the files that describe its model, or the averages.
        ExportFailed: Writing failed, or what was written reads back differently.
    """
    last = checkpoints[-1]
    check_target(directory)
    _check_writable(directory)
    with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
        origin = _origin(last, Path(folder), trust_remote_code=trust_remote_code)
        papers = _papers(checkpoints, Path(folder), averaged=averaged)
        means = ModelTensors(checkpoints, averaged=averaged)
        each = [ModelTensors([checkpoint], averaged=averaged) for checkpoint in checkpoints]
        section = _model_section(Path(folder))
        joins = _joins(origin, section)
        named = section.model_copy(update={"path": _settings(Path(folder))["model"]["path"]})
        frozen, read_frozen = frozen_weights(checkpoints, origin, named, base)
        headers = last.model_headers(None) | frozen
        _merge(headers, joins)

        def stored(tensors: ModelTensors, name: str) -> Tensor:
            return read_frozen(name) if name in frozen else tensors[name]

        def read(name: str) -> Tensor:
            with _reading(last):
                if name not in joins:
                    return stored(means, name)
                join = joins[name]
                return _mean([join.run([stored(tensors, part) for part in join.inputs]) for tensors in each])

        weights = model_weights(read, headers, origin, dtype, largest_file_bytes)
        write_export(weights, papers, directory, RankGroup(), origin)


def export_stored_adapter(
    checkpoint: StoredCheckpoint, directory: Path, *, dtype: torch.dtype | None = None, averaged: bool = False
) -> None:
    """Write a checkpoint's adapters in peft's format; also of one that holds nothing else.

    Args:
        checkpoint: Of a run with `model.lora`.
        directory: Replaced if it is an export.
        dtype: Cast to this; None keeps what is stored.
        averaged: Write the averages of the adapters that the run kept.

    Raises:
        ConfigError: The directory cannot be written.
        NoCheckpoint: The checkpoint has no adapters or no averages, or trained more than adapters.
        CheckpointCorrupt: A tensor's bytes are not those that were saved.
        ExportFailed: Writing failed, or what was written reads back differently.
    """
    check_target(directory)
    _check_writable(directory)
    with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
        _lay_assets(checkpoint, Path(folder))
        papers = _papers([checkpoint], Path(folder), averaged=averaged)
        lora = _model_section(Path(folder)).lora
        about = Path(folder) / ADAPTERS
        described_as = None if not about.exists() else Description(**read_json(about))
    if lora is None:
        raise NoCheckpoint(f"{checkpoint.path} has no adapters: its run had no model.lora. Leave out --adapter.")
    if described_as is None and lora.train:
        raise NoCheckpoint(
            f"{checkpoint.path} has more than peft's two files can hold: model.lora.train trained "
            f"{', '.join(lora.train)}, which is part of a module, tied to another, or has buffers. Leave out --adapter."
        )
    if described_as is None:
        raise NoCheckpoint(f"{checkpoint.path} does not describe its adapters: it was not saved by a training run.")
    modules = tuple(f"{module}." for module in modules_in(described_as.settings))
    headers = {
        name: header
        for name, header in checkpoint.model_headers(None).items()
        if ".lora_" in name or name.startswith(modules)
    }
    stored = ModelTensors([checkpoint], averaged=averaged)

    def read(name: str) -> Tensor:
        with _reading(checkpoint):
            return stored[name]

    write_adapters(read, headers, described_as, directory, RankGroup(), papers, dtype=dtype)


def stored_papers(checkpoint: StoredCheckpoint, *, averaged: bool = False) -> Papers:
    """Return what an export of a checkpoint says of itself.

    Args:
        checkpoint: Of a run.
        averaged: The export holds the averages of the weights.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
        _lay_assets(checkpoint, Path(folder))
        return _papers([checkpoint], Path(folder), averaged=averaged)


def _papers(checkpoints: Sequence[StoredCheckpoint], folder: Path, *, averaged: bool) -> Papers:
    """Return what an export says of itself: the run's configuration, its run and step, and its card."""
    manifest, steps = checkpoints[-1].manifest, [checkpoint.manifest.step for checkpoint in checkpoints]
    config = to_yaml(public_configuration(_settings(folder), WHOLE))  # of checkpoints of earlier commits, whole
    parent = folder / PARENT
    about = Exported(
        run_id=manifest.run_id,
        run=str(_settings(folder)["run"]["name"]),
        step=manifest.step,
        steps=steps if len(steps) > 1 else (),
        weights="averages" if averaged else "trained",
        parent=read_json(parent) if parent.exists() else None,
    )
    settings = _settings(folder)
    numbers = {name: value for name, value in manifest.metrics.items() if value is not None}
    card = card_of(settings, verb_of(settings), about, numbers, manifest.fingerprints.get("data", {}))
    return Papers(about, card, {EXPORTED_CONFIG: config})


def _check_writable(target: Path) -> None:
    """Refuse a place that cannot be written before anything is read.

    Raises:
        ConfigError: The nearest directory above is none, or not this user's to write.
    """
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"{target} cannot be written: {above} is no directory that this user can write to.")


@contextmanager
def _reading(checkpoint: StoredCheckpoint) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointUnreadable(
            f"{checkpoint.path} cannot be read any more: {error.strerror or error}. If its run goes on, retention may "
            "have deleted it: keep a checkpoint with `holdfast checkpoint pin` before it is exported."
        ) from error


def _model_section(folder: Path) -> ModelConfig:
    """Return the run's model section, with what the checkpoint's own files say in the place of its origin."""
    section = {**_settings(folder)["model"], "path": str(folder), "config": None}
    return ModelConfig(**section | {"config_override": {}, "image_processor": None})


def _settings(folder: Path) -> dict[str, Any]:
    return settings_of((folder / EXPORTED_CONFIG).read_bytes(), str(folder / EXPORTED_CONFIG))


def _joins(origin: Blueprint, section: ModelConfig) -> dict[str, Join]:
    """Return how matrices come out of the parameters that a run saved; none without adapters."""
    if section.lora is None:
        return {}
    model = copy.deepcopy(origin.skeleton)
    add_adapters(model, section.lora, storage_of(section)[1])
    return joins_of(model)


def _merge(headers: dict[str, Header], joins: Mapping[str, Join]) -> None:
    """Put the matrix of each join in the place of its parts."""
    for name, join in joins.items():
        for key in join.inputs[1:]:
            del headers[key]
        if join.header is not None:
            headers[name] = join.header


def _mean(matrices: Sequence[Tensor]) -> Tensor:
    """Return the mean of the matrices that checkpoints compute with, taken in float64."""
    total = sum(matrix.to(torch.float64) for matrix in matrices)
    assert isinstance(total, Tensor)
    return (total / len(matrices)).to(matrices[-1].dtype)


def _origin(checkpoint: StoredCheckpoint, folder: Path, *, trust_remote_code: bool) -> Blueprint:
    """Describe the model from the small files in its checkpoint."""
    _lay_assets(checkpoint, folder)
    section = _settings(folder)["model"]
    if section["trust_remote_code"] and not trust_remote_code:
        raise ConfigError(
            f"{checkpoint.path} says that its model comes with Python code of its own, which an export would run. "
            "Give --trust-remote-code if you trust whoever wrote this checkpoint."
        )
    config = ModelConfig(path=str(folder), trust_remote_code=section["trust_remote_code"])
    return described(config, folder, _stored_headers(folder / STORED_HEADERS))


def _lay_assets(checkpoint: StoredCheckpoint, folder: Path) -> None:
    """Write the small files of a checkpoint into a folder, verified."""
    prefix = f"{ASSETS}/"
    for file in checkpoint.manifest.files:
        if file.startswith(prefix):
            target = folder / file.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _reading(checkpoint):
                data = checkpoint.storage.read(f"{checkpoint.name}/{file}")
            if hash_bytes(data) != checkpoint.manifest.files[file].hash:
                raise CheckpointCorrupt(f"{checkpoint.path}/{file} is damaged: its hash is not the manifest's.")
            target.write_bytes(data)
    if not (folder / EXPORTED_CONFIG).exists() or not (folder / "config.json").exists():
        raise NoCheckpoint(
            f"{checkpoint.path} does not describe its model: it was not saved by a training run. Export it from the "
            "loop that made it, or use --format torch."
        )


def headers_json(headers: dict[str, Header]) -> bytes:
    """Return names and shapes as a file for the checkpoint."""
    plain = {name: [list(header.shape), str(header.dtype).removeprefix("torch.")] for name, header in headers.items()}
    return json.dumps(plain, sort_keys=True).encode()


def _stored_headers(path: Path) -> dict[str, Header] | None:
    if not path.exists():
        return None
    plain = read_json(path)
    return {name: Header(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in plain.items()}


def write_torch_file(checkpoint: StoredCheckpoint, path: Path) -> None:
    """Write {"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups": [...]}}.

    The whole state is in memory at once; `torch.load(path, weights_only=True)` reads it.

    Raises:
        ConfigError: The name is taken, or lies where nothing can be written.
        ExportFailed: Writing failed; nothing was left.
    """
    check_outside(path)
    if path.exists():
        raise _taken(path)
    _check_writable(path)
    with _reading(checkpoint):
        state = _whole_state(checkpoint)
    staging = path.with_name(f"{STAGING}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("xb") as file:
            torch.save(state, file)
            file.flush()
            # Without this, a rename can reach the disk before the data: after a power cut the file has its name and no
            # content.
            os.fsync(file.fileno())
        rename_new(staging, path)
        sync_directory(path.parent)
    except FileExistsError:
        raise _taken(path) from None
    except (OSError, RuntimeError) as error:  # torch tells of a full disk by a RuntimeError
        raise ExportFailed(f"{path} could not be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists. Remove it, or name another file.")


def _whole_state(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    model = {key.removeprefix(MODEL): checkpoint.read(key) for key in manifest.tensors if key.startswith(MODEL)}
    state: dict[str, dict[str, Any]] = {}
    for key in manifest.tensors:
        if key.startswith(OPTIM):
            name, _, slot = key.removeprefix(OPTIM).rpartition(".")
            state.setdefault(name, {})[slot] = checkpoint.read(key)
    for name, slots in records(manifest).items():
        for slot, record in slots.items():
            components = {component: state[name].pop(f"{slot}{BETWEEN}{component}") for component in record["parts"]}
            state[name][slot] = {"class": record["class"], "record": dict(record), "parts": components}
    groups: list[dict[str, Any]] = []
    if manifest.optimizer is not None:
        for name, values in manifest.optimizer["values"].items():
            state.setdefault(name, {}).update({slot: decode(value) for slot, value in values.items()})
        groups = [
            {"params": list(group["parameters"])}
            | {key: decode(value) for key, value in group["hyperparameters"].items()}
            for group in manifest.optimizer["groups"]
        ]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}
