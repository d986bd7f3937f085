"""Collect the contents of a run's checkpoint: model, optimizer, companions, counters, and small files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.export.assets import ExportFailed, check_readable, write_assets
from holdfast.checkpoint.export.stored import ADAPTERS, PARENT, STORED_HEADERS, headers_json
from holdfast.checkpoint.format.snapshot import (
    LiveTensors,
    Outline,
    RandomState,
    Snapshot,
    hold,
    outline,
    take,
    with_companions,
)
from holdfast.checkpoint.loading.base import BASE
from holdfast.checkpoint.saving.rehearsal import RehearsalFailed, TrainedState
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.files import expanded
from holdfast.models.adapters.files import AdapterSource
from holdfast.models.files.loading import StoredSource
from holdfast.parallel.collectives import RankGroup
from holdfast.training import directory
from holdfast.training.run import Training
from holdfast.training.saving.emergency import StepState
from holdfast.training.saving.exports import describe_adapters
from holdfast.training.saving.parents import parent_of


class Contents:
    """Collects the tensors of a run once; their values are read whenever a snapshot is taken."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._full = training.run.config.checkpoint.contents == "full"
        self.tensors: LiveTensors = hold(
            training.model.module,
            frozen=training.run.config.checkpoint.frozen != "skip",
            averages=training.model.averages.tensors if training.model.averages is not None else None,
        )
        self._companions = training.saved_companions
        self._companion_tensors = {name: companion.held() for name, companion in self._companions.items()}

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state is saved; None if only weights are saved."""
        return self._training.model.optimizer if self._full else None

    def companion_states(self) -> dict[str, TrainedState]:
        """Return what is saved of models beside the run's own, by name."""
        companions = self._companions
        return {
            name: (tensors, companions[name].optimizer if self._full else None)
            for name, tensors in self._companion_tensors.items()
        }

    def snapshot(self, moment: StepState, ranks: RankGroup) -> Snapshot:
        """Return a snapshot of the run between two steps; all ranks call this together."""
        training = self._training
        snapshot = take(
            self.tensors,
            self.optimizer,
            shared=moment.shared(ranks),
            assets=run_assets(training) if training.run.world.is_first else {},
            random_then=moment.random,
        )
        return self._with_companions(snapshot)

    def outline(self) -> Outline:
        """Return shape, dtype and trained flag of every tensor, by name."""
        return outline(self.tensors_alone())

    def tensors_alone(self, random_then: RandomState | None = None) -> Snapshot:
        """Return what is saved of the model, of its optimizer and of those trained beside it, without the run's state.

        Args:
            random_then: Stands for the random state; default: as it is now.
        """
        return self._with_companions(take(self.tensors, self.optimizer, random_then=random_then), random_then)

    def _with_companions(self, snapshot: Snapshot, random_then: RandomState | None = None) -> Snapshot:
        companions = self.companion_states().items()
        return with_companions(
            snapshot,
            {name: take(tensors, optimizer, random_then=random_then) for name, (tensors, optimizer) in companions},
        )


def fingerprints_of(training: Training) -> dict[str, Mapping[str, str]]:
    """Return the fingerprints of a checkpoint: the run's identity, and where the base lies that it is saved beside."""
    run, model_directory = training.run, training.model.blueprint.directory
    name = run.config.model.path
    if name is None or model_directory is None or run.config.checkpoint.frozen != "skip":
        return dict(training.identity)
    is_local = model_directory in {(root / expanded(name)).resolve() for root in (Path.cwd(), run.base)}
    return {**training.identity, **({BASE: {"path": name, "directory": str(model_directory)}} if is_local else {})}


def run_assets(training: Training) -> dict[str, bytes]:
    """Return configuration, tokenizer, chat template, processor and generation settings by file name."""
    if not training.assets:
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
            write_assets(Path(folder), training.model.blueprint, getattr(torch, training.run.config.model.dtype))
            check_readable(Path(folder), training.model.blueprint)
            training.assets |= {
                str(file.relative_to(folder)): file.read_bytes()
                for file in sorted(Path(folder).rglob("*"))
                if file.is_file()
            }
        source = training.model.blueprint.source
        source = source.base if isinstance(source, AdapterSource) else source
        if isinstance(source, StoredSource):
            training.assets[STORED_HEADERS] = headers_json(dict(source.stored.headers))
        about = describe_adapters(training)
        if about is not None:
            training.assets[ADAPTERS] = json.dumps(asdict(about), sort_keys=True).encode()
        parent = parent_of(training)
        if parent is not None:
            training.assets[PARENT] = json.dumps(parent, sort_keys=True).encode()
        training.assets[EXPORTED_CONFIG] = directory.portable_yaml(training.run.config).encode()
    return training.assets


def checked_assets(training: Training) -> dict[str, bytes]:
    """Return the small files of every checkpoint, on rank 0, and refuse what transformers cannot write.

    Raises:
        RehearsalFailed: transformers cannot write one of them; nothing was trained.
    """
    if training.run.world.is_first:
        parent_of(
            training
        )  # outside of what follows: a run.json that cannot be read says nothing against the model's files
    try:
        return run_assets(training) if training.run.world.is_first else {}
    except ExportFailed as error:
        raise RehearsalFailed(f"{error} Nothing was trained.") from error
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise RehearsalFailed(
            "Configuration, tokenizer or processor of this model cannot be written, and every checkpoint and "
            f"export holds them: {type(error).__name__}: {error}. Nothing was trained. Mend what model.path or "
            "model.tokenizer names: its save_pretrained must work."
        ) from error
