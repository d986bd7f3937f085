"""Read a checkpoint into a model and an optimizer; nothing live is touched until everything was read and verified.

What is in the checkpoint must match what it is loaded into: names, shapes, dtypes, which parameters are trained, the
optimizer's class. Each deviation must be declared by pattern, and is recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from holdfast.checkpoint.dcp_files import Reader, one_process_is_meant, without_chunks
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnreadable
from holdfast.checkpoint.hashing import hash_tensor
from holdfast.checkpoint.layout import DCP, TRAINER, rank_file
from holdfast.checkpoint.manifest import Manifest, TensorEntry
from holdfast.checkpoint.snapshot import MODEL, OPTIM, TRAINED, Snapshot, chunk_of, like, model_tensors
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.verification import check_names, damaged_files, damaged_tensors, read_manifest
from holdfast.optim.state import (
    GroupState,
    OptimizerState,
    groups_of,
    hyperparameter_changes,
    names_of,
    qualified_name,
    restore,
    set_hyperparameters,
)
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.materialise import local_part, sharded_parameters


@dataclass(frozen=True)
class Declared:
    """Deviations a user allows, as patterns of canonical parameter names."""

    add: Sequence[str] = ()
    """In the model, not in the checkpoint: keep what they are."""
    drop: Sequence[str] = ()
    """In the checkpoint, not in the model: leave behind."""
    cast: Sequence[str] = ()
    """Stored in another dtype: convert."""
    freeze: Sequence[str] = ()
    """Trained then, frozen now: leave their optimizer state behind."""
    unfreeze: Sequence[str] = ()
    """Frozen then, trained now: start without optimizer state."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said besides tensors."""

    manifest: Manifest
    shared: dict[str, Any]
    rank_state: dict[str, Any] | None
    """Of this rank; None if the checkpoint was written by another number of ranks."""
    notes: tuple[str, ...]
    """What a user should read: deviations and changed hyper-parameters."""
    deviations: tuple[str, ...]


@dataclass
class _Plan:
    """What will be read, and what was allowed to differ."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """DCP name -> staging memory in the live sharding"""
    deviations: list[str] = field(default_factory=list)
    kept: int = 0
    """Frozen tensors that the checkpoint leaves to the model."""
    refused: list[str] = field(default_factory=list)


def load(
    storage: Storage,
    name: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: ProcessExchange,
    *,
    declared: Declared | None = None,
    hyperparameters: Literal["live", "checkpoint"] = "live",
    verified: Manifest | None = None,
) -> Loaded:
    """Load a checkpoint; every rank calls this.

    Args:
        storage: Where checkpoints are.
        name: Which one.
        model: Sharded in any way, on any number of ranks.
        optimizer: Built for it; None reads the model only. Live gradients do not matter.
        ranks: A group of its own.
        declared: What may differ.
        hyperparameters: Whether rates, betas and the like stay as they are or come from the checkpoint. The schedule's
            rate is a function of the step and never read.
        verified: The manifest, if its files were verified a moment ago.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: On all ranks; nothing was touched.
    """
    declared = declared or Declared()
    manifest = verified if verified is not None else verified_manifest(storage, name, ranks)
    parameters = sharded_parameters(model)
    plan = _Plan()
    with ranks.together():
        _plan_model(plan, model, parameters, manifest, declared)
        if optimizer is not None:
            _plan_optimizer(plan, optimizer, parameters, manifest)
        if plan.refused:
            raise CheckpointMismatch(_refusal(storage, name, plan.refused))
    _read(plan.tensors, storage, name, manifest, ranks)
    small: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
    with ranks.together():
        small.append(_small(storage, name, manifest, ranks))
    rank_state, shared = small[0]
    # From here on nothing can fail for a reason of the checkpoint's.
    live = model_tensors(model)
    with torch.no_grad():
        for key, staged in plan.tensors.items():
            if key in live:
                local_part(live[key]).copy_(local_part(staged))
    notes = list(plan.deviations)
    if plan.kept:
        notes.append(f"{plan.kept} frozen tensors are not in the checkpoint and stay as the model came with them")
    if optimizer is not None:
        notes += _restore_optimizer(plan, optimizer, parameters, manifest, hyperparameters)
    return Loaded(manifest, shared, rank_state, tuple(notes), tuple(plan.deviations))


def verified_manifest(storage: Storage, name: str, ranks: ProcessExchange) -> Manifest:
    """Return the manifest after every file's hash was compared, the files dealt out over ranks.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointUnreadable: On all ranks.
    """
    found: list[Manifest] = []
    with ranks.together():
        if ranks.rank == 0:
            found.append(read_manifest(storage, name))
            check_names(storage, name, found[0])
    manifest = ranks.agree(found[0] if found else None)
    assert manifest is not None
    mine: list[str] = []
    with ranks.together():
        mine += damaged_files(storage, name, manifest, sorted(manifest.files)[ranks.rank :: ranks.size])
    damaged = sorted({file for part in ranks.gather(mine) for file in part})
    if damaged:
        tensors = ranks.agree(damaged_tensors(storage, name, manifest, damaged) if ranks.rank == 0 else [])
        holds = f"; damaged tensors: {', '.join(tensors[:4])}" if tensors else ""
        raise CheckpointCorrupt(
            f"{storage.root}/{name}/{damaged[0]} is damaged: its hash is not the manifest's{holds}."
        )
    return manifest


def _plan_model(
    plan: _Plan, model: nn.Module, parameters: Mapping[str, nn.Parameter], manifest: Manifest, declared: Declared
) -> None:
    stored = {key: entry for key, entry in manifest.tensors.items() if key.startswith(MODEL)}
    live = model_tensors(model)
    partial = TRAINED in manifest.contents
    for key in sorted({*stored, *live}):
        name = key.removeprefix(MODEL)
        if key not in stored:
            _plan_missing(plan, name, parameters.get(name), partial, declared)
        elif key not in live:
            _allow(plan, declared.drop, name, f"{name} is in the checkpoint and not in the model", "resume.drop")
        elif tuple(live[key].shape) != stored[key].shape:
            plan.refused.append(f"{name} is {list(stored[key].shape)} there and {list(live[key].shape)} here")
        else:
            _plan_tensor(plan, key, live[key], stored[key], declared)
            trained = name in parameters and parameters[name].requires_grad
            if name in parameters and trained != stored[key].requires_grad:
                patterns, flag = (declared.unfreeze, "unfreeze") if trained else (declared.freeze, "freeze")
                words = "frozen then and is trained now" if trained else "trained then and is frozen now"
                _allow(plan, patterns, name, f"{name} was {words}", f"resume.{flag}")


def _plan_missing(plan: _Plan, name: str, parameter: nn.Parameter | None, partial: bool, declared: Declared) -> None:
    """Plan a tensor that the checkpoint does not hold; frozen ones that it leaves out stay as they are."""
    if partial and parameter is not None and not parameter.requires_grad:
        plan.kept += 1
    else:
        _allow(plan, declared.add, name, f"{name} is in the model and not in the checkpoint", "resume.add")


def _plan_tensor(plan: _Plan, key: str, live: Tensor, entry: TensorEntry, declared: Declared) -> None:
    dtype = getattr(torch, entry.dtype)
    name = key.removeprefix(MODEL)
    if dtype != live.dtype:
        here = str(live.dtype).removeprefix("torch.")
        _allow(plan, declared.cast, name, f"{name} is {entry.dtype} there and {here} here", "resume.cast")
    plan.tensors[key] = _staging(live, dtype, entry)


def _plan_optimizer(
    plan: _Plan, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], manifest: Manifest
) -> None:
    if manifest.optimizer is None:
        plan.refused.append(
            "the checkpoint has no optimizer state (it holds "
            f"{', '.join(manifest.contents)}). To start a new run from its weights, set init_from instead of resuming"
        )
        return
    if manifest.optimizer["kind"] != qualified_name(optimizer):
        plan.refused.append(f"its optimizer is {manifest.optimizer['kind']}, this run's is {qualified_name(optimizer)}")
        return
    names = names_of(optimizer, parameters)
    for key, entry in manifest.tensors.items():
        if not key.startswith(OPTIM):
            continue
        name = key.removeprefix(OPTIM).rpartition(".")[0]
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in names or not parameter.requires_grad:
            continue  # the parameter's own deviation was declared, or refused above
        sharded = entry.shape == tuple(parameter.shape)
        dtype = getattr(torch, entry.dtype)
        whole = _poisoned(torch.Size(entry.shape), dtype)
        plan.tensors[key] = _staging(parameter.data, dtype, entry) if sharded else whole


def _staging(live: Tensor, dtype: torch.dtype, entry: TensorEntry) -> Tensor:
    """Return memory for this rank's part of a tensor.

    Where this very part was saved as a chunk, its hash will say whether all of it was read; elsewhere the memory shows
    what was not.
    """
    shape, place = local_part(live).shape, chunk_of(live)
    hashed = any((chunk.offsets, chunk.sizes) == place for chunk in entry.chunks)
    return like(live, torch.empty(shape, dtype=dtype) if hashed else _poisoned(shape, dtype))


def _poisoned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory that shows if it was not written: NaN, or zero for types that have none."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else (dtype == torch.bool), dtype=dtype)


def _allow(plan: _Plan, patterns: Sequence[str], name: str, what: str, flag: str) -> None:
    if any(re.search(pattern, name) for pattern in patterns):
        plan.deviations.append(f"{what} ({flag})")
    else:
        plan.refused.append(f"{what} (allow it with {flag})")


def _refusal(storage: Storage, name: str, refused: Sequence[str]) -> str:
    more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
    return f"{storage.root}/{name} does not fit this run: {'; '.join(refused[:4])}{more}. Nothing was changed."


def check_read_back(
    storage: Storage, name: str, manifest: Manifest, snapshot: Snapshot, ranks: ProcessExchange
) -> None:
    """Read every tensor of a checkpoint into memory filled with NaN, and compare it with the live one it was made of.

    Raises:
        CheckpointCorrupt: Something was not read, or reads back differently; the tensor is named, on all ranks.
    """
    staging = {key: like(live, _poisoned(local_part(live).shape, live.dtype)) for key, live in snapshot.tensors.items()}
    _read(staging, storage, name, manifest, ranks)
    with ranks.together():
        for key, live in snapshot.tensors.items():
            if hash_tensor(local_part(staging[key])) != hash_tensor(local_part(live)):
                raise CheckpointCorrupt(f"{storage.root}/{name}: {key} reads back differently from what was saved.")


def _read(
    tensors: Mapping[str, Tensor], storage: Storage, name: str, manifest: Manifest, ranks: ProcessExchange
) -> None:
    """Read into staging memory, and compare with the hashes of what was saved wherever chunks are the same."""
    reader = Reader(storage, f"{name}/{DCP}")
    if ranks.size == 1:
        one_process_is_meant()
    with ranks.together():
        partly = without_chunks(reader.read_metadata(), manifest.tensors) if ranks.rank == 0 else []
        if partly:
            raise CheckpointCorrupt(f"{storage.root}/{name}: .metadata lacks a part of {partly[0]}.")
    try:
        if tensors:
            dcp_load(dict(tensors), storage_reader=reader, process_group=ranks.group, no_dist=ranks.size == 1)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointCorrupt(f"{storage.root}/{name} cannot be read on rank {rank}: {cause}.") from error
    with ranks.together():
        for key, tensor in tensors.items():
            chunk = next((c for c in manifest.tensors[key].chunks if (c.offsets, c.sizes) == chunk_of(tensor)), None)
            if chunk is not None and hash_tensor(local_part(tensor)) != chunk.hash:
                raise CheckpointCorrupt(f"{storage.root}/{name}: {key} reads back differently from what was saved.")


def _small(
    storage: Storage, name: str, manifest: Manifest, ranks: ProcessExchange
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    written_by = sum(file.startswith("rank/") for file in manifest.files)
    rank_state = None
    try:
        if written_by == ranks.size:
            rank_state = json.loads(storage.read(f"{name}/{rank_file(ranks.rank)}"))
        shared = json.loads(storage.read(f"{name}/{TRAINER}")) if TRAINER in manifest.files else {}
    except OSError as error:
        raise CheckpointUnreadable(f"{storage.root}/{name} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # one rank's alone: the others would wait for it
        raise CheckpointCorrupt(f"{storage.root}/{name}: a state beside the tensors is no JSON: {error}.") from error
    return rank_state, shared


def _restore_optimizer(
    plan: _Plan,
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    manifest: Manifest,
    hyperparameters: str,
) -> list[str]:
    assert manifest.optimizer is not None
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, staged in plan.tensors.items():
        if key.startswith(OPTIM):
            name, _, slot = key.removeprefix(OPTIM).rpartition(".")
            local = local_part(staged)
            counter = local.ndim == 0  # where it belongs is the optimizer's business
            tensors.setdefault(name, {})[slot] = (
                local if counter else like(staged, local.to(local_part(parameters[name].data).device))
            )
    names = names_of(optimizer, parameters)
    known = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    values = {name: keys for name, keys in manifest.optimizer["values"].items() if name in known}
    groups = tuple(
        GroupState(tuple(group["parameters"]), group["hyperparameters"]) for group in manifest.optimizer["groups"]
    )
    saved = OptimizerState(manifest.optimizer["kind"], groups, tensors, values)
    live = OptimizerState(saved.kind, groups_of(optimizer, names))
    changes = hyperparameter_changes(live, saved)
    restore(optimizer, parameters, saved)
    if hyperparameters == "checkpoint":
        set_hyperparameters(optimizer, saved)
        return [f"optimizer: {change}; the checkpoint's value is used" for change in changes]
    return [f"optimizer: {change}; this run's value is used" for change in changes]
