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
from holdfast.training.run import Run
from holdfast.training.saving.emergency import StepState
from holdfast.training.saving.exports import describe_adapters
from holdfast.training.saving.parents import parent_of


class Contents:
    """Collects the tensors of a run once; their values are read whenever a snapshot is taken."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._full = run.setting.config.checkpoint.contents == "full"
        self.tensors: LiveTensors = hold(
            run.trained.model,
            frozen=run.setting.config.checkpoint.frozen != "skip",
            averages=run.trained.averages.tensors if run.trained.averages is not None else None,
        )
        self._companions = run.saved_companions
        self._companion_tensors = {name: companion.held() for name, companion in self._companions.items()}

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state is saved; None if only weights are saved."""
        return self._run.trained.optimizer if self._full else None

    def companion_states(self) -> dict[str, TrainedState]:
        """Return what is saved of models beside the run's own, by name."""
        companions = self._companions
        return {
            name: (tensors, companions[name].optimizer if self._full else None)
            for name, tensors in self._companion_tensors.items()
        }

    def snapshot(self, moment: StepState, ranks: RankGroup) -> Snapshot:
        """Return a snapshot of the run between two steps; all ranks call this together."""
        run = self._run
        snapshot = take(
            self.tensors,
            self.optimizer,
            shared=moment.shared(ranks),
            assets=run_assets(run) if run.setting.world.is_first else {},
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


def fingerprints_of(run: Run) -> dict[str, Mapping[str, str]]:
    """Return the fingerprints of a checkpoint: the run's identity, and where the base lies that it is saved beside."""
    setting, model_directory = run.setting, run.trained.origin.directory
    name = setting.config.model.path
    if name is None or model_directory is None or setting.config.checkpoint.frozen != "skip":
        return dict(run.identity)
    is_local = model_directory in {(root / expanded(name)).resolve() for root in (Path.cwd(), setting.base)}
    return {**run.identity, **({BASE: {"path": name, "directory": str(model_directory)}} if is_local else {})}


def run_assets(run: Run) -> dict[str, bytes]:
    """Return configuration, tokenizer, chat template, processor and generation settings by file name."""
    if not run.assets:
        with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
            write_assets(Path(folder), run.trained.origin, getattr(torch, run.setting.config.model.dtype))
            check_readable(Path(folder), run.trained.origin)
            run.assets |= {
                str(file.relative_to(folder)): file.read_bytes()
                for file in sorted(Path(folder).rglob("*"))
                if file.is_file()
            }
        source = run.trained.origin.source
        source = source.base if isinstance(source, AdapterSource) else source
        if isinstance(source, StoredSource):
            run.assets[STORED_HEADERS] = headers_json(dict(source.stored.headers))
        about = describe_adapters(run)
        if about is not None:
            run.assets[ADAPTERS] = json.dumps(asdict(about), sort_keys=True).encode()
        parent = parent_of(run)
        if parent is not None:
            run.assets[PARENT] = json.dumps(parent, sort_keys=True).encode()
        run.assets[EXPORTED_CONFIG] = directory.portable_yaml(run.setting.config).encode()
    return run.assets


def checked_assets(run: Run) -> dict[str, bytes]:
    """Return the small files of every checkpoint, on rank 0, and refuse what transformers cannot write.

    Raises:
        RehearsalFailed: transformers cannot write one of them; nothing was trained.
    """
    if run.setting.world.is_first:
        parent_of(run)  # outside of what follows: a run.json that cannot be read says nothing against the model's files
    try:
        return run_assets(run) if run.setting.world.is_first else {}
    except ExportFailed as error:
        raise RehearsalFailed(f"{error} Nothing was trained.") from error
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise RehearsalFailed(
            "Configuration, tokenizer or processor of this model cannot be written, and every checkpoint and "
            f"export holds them: {type(error).__name__}: {error}. Nothing was trained. Mend what model.path or "
            "model.tokenizer names: its save_pretrained must work."
        ) from error
