"""Counts the bytes of a run's checkpoints and exports, using the same functions that write them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.checkpoint.export.assets import write_assets
from holdfast.checkpoint.export.write import check_export_names
from holdfast.checkpoint.format.manifest import Manifest, TensorEntry
from holdfast.checkpoint.format.snapshot import (
    RandomState,
    Snapshot,
    random_state_as_json,
)
from holdfast.checkpoint.saving.agreement import described_optimizers
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ModelError
from holdfast.models.adapters.files import PEFT_PREFIX, names_in_file
from holdfast.models.adapters.live import whole_modules
from holdfast.models.files.conversion import Header
from holdfast.models.files.safetensors_files import file_bytes, plan_files
from holdfast.models.setup.model import Blueprint, storage_of
from holdfast.optim.wrapped import NotSeparable, shards_of
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.policy.ahead import largest_ahead
from holdfast.training.run import Training
from holdfast.training.saving.run_snapshot import Contents

CHUNK_BYTES = 560
"""Size of what a file's header and the manifest say of one stored chunk."""
_NOT_WRITTEN = (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What transformers raises where it cannot write one of its files."""


def host_random_state() -> RandomState:
    """Return the state of this process's generators without asking a GPU for its own."""
    return RandomState(random.getstate(), np.random.get_state(), torch.get_rng_state(), None)  # noqa: NPY002 - as saved


def saved_snapshot(training: Training, state: RandomState) -> Snapshot:
    """Return what a checkpoint of the run takes of its models and optimizers.

    Args:
        training: With a model that has made a step.
        state: Stands for the random state, whose numbers nobody asks for.
    """
    with _disable_current_modes():  # the random state holds numbers
        return Contents(training).tensors_alone(state)


def manifest_of(snapshot: Snapshot) -> Manifest:
    """Return the manifest of a checkpoint of a snapshot, without files and hashes."""
    tensors = {
        name: TensorEntry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), (), name in snapshot.trained)
        for name, tensor in snapshot.tensors.items()
    }
    return Manifest("", 0, snapshot.contents, {}, tensors, snapshot.ties, described_optimizers(snapshot))


def checkpoint_bytes(tensors: Iterable[Tensor], ranks: int, state: RandomState) -> int:
    """Return the bytes of a checkpoint's files, but for configuration and tokenizer.

    Args:
        tensors: As a snapshot has them: quantised ones in their parts.
        ranks: Each of which writes its random state.
        state: Of one of them.
    """
    stored = sum(prod(tensor.shape) * tensor.element_size() + CHUNK_BYTES * _chunks(tensor) for tensor in tensors)
    with _disable_current_modes():
        return stored + ranks * len(json.dumps(random_state_as_json(state)))


def _chunks(tensor: Tensor) -> int:
    """Return how many ranks store rows of a tensor."""
    try:
        shards = shards_of(tensor)
    except NotSeparable:  # not by rows alone
        assert isinstance(tensor, DTensor)
        return tensor.device_mesh.size()
    rows = tensor.shape[0] if tensor.ndim else 1
    return -(-rows // max(1, -(-rows // shards)))


def export_bytes(config: TrainingConfig, policy: nn.Module, origin: Blueprint, notes: list[str]) -> int:
    """Return the bytes of weights in everything that an export writes: the model, its adapters, averages beside it.

    Args:
        config: Of the run.
        policy: Its model.
        origin: What that was built from.
        notes: Where it is said that they could not be counted, which is 0 bytes.
    """
    section, ema = config.checkpoint, config.optim.ema
    dtype = None if section.export_dtype == "same" else getattr(torch, section.export_dtype)
    try:
        headers = check_export_names(policy, origin, dtype)
    except ModelError as error:
        notes.append(f"exports: their bytes are not counted ({error})")
        return 0
    files = plan_files(headers, section.export_shard_bytes)
    written = sum(file_bytes({name: headers[name] for name in members}) for members in files.values())
    if config.model.lora is not None and whole_modules(policy) is not None:
        parameters = sharded_parameters(policy)
        adapters = {name: parameters[name] for name in names_in_file(policy)}
        written += file_bytes(
            {
                PEFT_PREFIX + name: Header(tuple(parameter.shape), parameter.dtype)
                for name, parameter in adapters.items()
            }
        )
    return written * (2 if ema is not None and ema.export == "beside" else 1)


def ahead_bytes(config: TrainingConfig) -> int:
    """Return the most bytes that a checkpoint has of completions of the next steps (`rollout.max_staleness`)."""
    if not isinstance(config, GRPOConfig) or not config.rollout.max_staleness:
        return 0
    longest = largest_ahead(config)
    return len(longest) * (len(json.dumps(longest[0])) + 2)


def small_bytes(config: TrainingConfig, origin: Blueprint) -> int:
    """Return the bytes of configuration, tokenizer and generation settings, which checkpoints and exports hold.

    Where transformers cannot write them it is 0; a run says that itself, before its first step.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        try:
            write_assets(Path(folder), origin, storage_of(config.model)[0])
        except _NOT_WRITTEN:
            return 0
        return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
