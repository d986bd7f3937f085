"""Load a checkpoint into a model and an optimizer; nothing live is changed until everything was read and verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import check_random_state, coordinate_of, mesh_of
from holdfast.checkpoint.format.verification import named_manifest, verified_bytes
from holdfast.checkpoint.loading.chunk_reader import read_targets
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.loading.parts import Companion, live_parts
from holdfast.checkpoint.loading.plan import execute, plan_load, states_read
from holdfast.checkpoint.place.layout import RANK, TRAINER, place_file, rank_file
from holdfast.checkpoint.place.memory import no_memory_for
from holdfast.checkpoint.place.storage import Storage
from holdfast.files import parse_json
from holdfast.optim.state import OptimizerState
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.classify import is_out_of_memory

StateCheck = Callable[[Mapping[str, Any], Mapping[str, Any] | None], object]
"""Called with the shared state and this rank's own state (or None) before anything live is changed; may raise."""

_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)
"""Exceptions that reading a JSON state of an unexpected form may raise."""


@dataclass(frozen=True)
class LoadedState:
    """The contents of a loaded checkpoint besides tensors."""

    manifest: Manifest
    shared: dict[str, Any]
    """State that is equal on all ranks."""
    rank_state: dict[str, Any] | None
    """State of this rank; None if the checkpoint was written by another number of ranks, or on another mesh."""
    notes: tuple[str, ...]
    """Notes for the user: deviations and changed hyper-parameters."""
    deviations: tuple[str, ...]


def load_state(  # noqa: PLR0913 - what a checkpoint is read into, and how it may differ
    storage: Storage,
    name: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: RankGroup,
    *,
    declared: Declared | None = None,
    hyperparameters: Literal["live", "checkpoint"] = "live",
    manifest: Manifest | None = None,
    averages: Mapping[str, Tensor] | None = None,
    companions: Mapping[str, Companion] | None = None,
    check: StateCheck = lambda _, __: None,
) -> LoadedState:
    """Load a checkpoint; every rank calls this.

    Args:
        storage: Storage of the checkpoints.
        name: Name of the checkpoint in it.
        model: The model, in any sharding, on any number of ranks.
        optimizer: The model's optimizer; None to load only the model. Gradients do not matter.
        ranks: A separate process group.
        declared: Allowed deviations.
        hyperparameters: Whether betas, epsilon and the like stay as they are or come from the checkpoint. The
            scheduled learning rate is a function of the step and is never read.
        manifest: The manifest, if the names and sizes of its files have just been compared with it.
        averages: Averages of trained parameters to load as well; None ignores those of the checkpoint.
        companions: Further models to load, by name; None ignores those of the checkpoint.
        check: Raises if the state besides tensors is not usable for the caller.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch, CheckpointUnreadable: On all ranks; nothing was changed.
    """
    declared = declared or Declared()
    manifest = manifest or named_manifest(storage, name, ranks)
    parts, full_path = live_parts(model, optimizer, averages, companions), f"{storage.root}/{name}"
    plan = ranks.on_all_ranks(
        lambda: plan_load(parts, manifest, declared, hyperparameters, full_path, companions=companions is not None)
    )
    tensors = read_targets(plan.targets, storage, name, manifest, ranks)

    def rest() -> tuple[dict[str, Any] | None, dict[str, Any], list[OptimizerState | None]]:
        rank_state, shared = _small(storage, name, manifest, ranks, model)
        _check_small(full_path, rank_state, shared, manifest, check)
        return rank_state, shared, states_read(plan, tensors)

    rank_state, shared, states = ranks.on_all_ranks(rest)
    # From here on nothing can fail for a reason of the checkpoint's.
    notes = execute(plan, tensors, states)
    return LoadedState(manifest, shared, rank_state, tuple(notes), plan.deviations)


def _small(
    storage: Storage, name: str, manifest: Manifest, ranks: RankGroup, model: nn.Module
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the saved state of the rank at this rank's mesh coordinate (None on another mesh), and the shared state.

    A mesh with other axes is another mesh, even where the number of ranks is equal.
    """
    written_by = sum(file.startswith(f"{RANK}/") for file in manifest.files)
    moved = bool(manifest.mesh) and _axes(mesh_of(model)) != _axes(manifest.mesh)
    rank_state = None
    full_path = f"{storage.root}/{name}"
    try:
        if written_by == ranks.size and not moved:
            placed = place_file(manifest.mesh, coordinate_of(model))
            state_file = placed if placed is not None and placed in manifest.files else rank_file(ranks.rank)
            if state_file not in manifest.files:
                raise CheckpointCorrupt(f"{full_path} lacks {state_file}, the own state of rank {ranks.rank}.")
            rank_state = parse_json(verified_bytes(storage, name, manifest, state_file))
        shared = parse_json(verified_bytes(storage, name, manifest, TRAINER)) if TRAINER in manifest.files else {}
    except ValueError as error:  # one rank's alone: the others would wait for it
        raise CheckpointCorrupt(f"{full_path}: a state beside the tensors is no JSON: {error}.") from error
    return rank_state, shared


def _check_small(
    full_path: str, rank_state: dict[str, Any] | None, shared: dict[str, Any], manifest: Manifest, check: StateCheck
) -> None:
    """Check that the state besides tensors can be restored; correct hashes do not imply that.

    Raises:
        CheckpointCorrupt: It cannot.
        CheckpointUnreadable: Memory ran out during the check.
    """
    whose = TRAINER
    try:
        if not isinstance(shared, dict):
            raise TypeError("it is no object")
        check(shared, None)
        whose = "a rank's own state"
        if rank_state is not None:
            check_random_state(rank_state["random"])
            check(shared, rank_state)
    except _WRONG as error:
        if is_out_of_memory(error):
            raise no_memory_for(full_path) from error
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else error
        raise CheckpointCorrupt(
            f"{full_path}: {whose} of step {manifest.step} is not what was written there, although its hash fits: "
            f"{reason}. Somebody changed it, or another program wrote it. Nothing was changed."
        ) from error


def _axes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of a mesh whose size is above 1."""
    return {axis: size for axis, size in mesh.items() if size > 1}
