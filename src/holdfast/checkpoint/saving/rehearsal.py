"""Rehearse a checkpoint before the first step: save, verify and load once, with the real mesh, files and names.

The optimizer has no state before its first step, and a step to create it would change training. The rehearsal instead
saves the state that the optimizer will have, filled with zeros, reads every chunk back, and compares its hash with that
of the live tensor; no copy is kept. Model, optimizer, gradients and random generators are not changed.
"""

from __future__ import annotations

import math
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format.manifest import About
from holdfast.checkpoint.format.snapshot import (
    LiveTensors,
    Outline,
    Snapshot,
    hold,
    outline,
    staged,
    take,
    with_companions,
)
from holdfast.checkpoint.format.verification import named_manifest
from holdfast.checkpoint.loading.chunk_reader import check_read_back
from holdfast.checkpoint.place.layout import REHEARSAL, TENSORS, fresh
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.saving.writer import commit
from holdfast.errors import UserError
from holdfast.files import size_words
from holdfast.optim.state import OptimizerState, collect
from holdfast.optim.state_template import inert_state
from holdfast.parallel.collectives import RankGroup

_HOURS_BETWEEN_FAILURES = 50_000
"""Mean time between failures of one rank: 419 interruptions of 16,384 GPUs in 54 days (The Llama 3 Herd of Models,
section 3.3.4)."""
TrainedState = tuple[LiveTensors, Optimizer | None]
"""The tensors of a model that will be saved, and its optimizer if it has one."""

NONCE = "nonce"


class RehearsalFailed(UserError):  # noqa: N818 - the name says what happened
    """A trial checkpoint that could not be saved, verified or read back; raised before step 1 or later."""


@dataclass(frozen=True)
class NonTensorState:
    """What a checkpoint holds besides tensors; the fields are arguments of `snapshot.take`."""

    shared: Mapping[str, Any] = field(default_factory=lambda: {"rehearsal": True})
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    assets: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointCounts:
    """Number of checkpoints that need room, without the one being written and the one being deleted."""

    keep: int = 3
    """Checkpoints that retention keeps."""
    replaced: int = 0
    """Existing checkpoints that newer ones will replace, and whose room will become free."""


@dataclass(frozen=True)
class RehearsalReport:
    """The size and the times of a checkpoint, as the rehearsal measured them."""

    bytes_: int
    """Size of one checkpoint, over all ranks."""
    copy_seconds: float
    """Time of the copy, for which training waits in a background save."""
    save_seconds: float
    """Time of a save that does not run in the background."""
    load_seconds: float
    """Time of loading, verification included."""
    outline: Outline
    """Names, shapes and dtypes of the state that was saved."""
    pinning_seconds: float = 0.0
    """Time to pin the host memory of the copy, once in a process; 0 where no tensor is on a device."""

    def describe(self, *, ranks: int, background: bool) -> str:
        """Return one line for the start of a run.

        Args:
            ranks: Number of ranks; more ranks fail more often, so the suggested interval between saves is shorter.
            background: Whether saves run in the background, so that training waits for the copy alone.
        """
        waits = self.copy_seconds if background else self.save_seconds
        interval = best_interval(waits, _HOURS_BETWEEN_FAILURES * 3600 / ranks)
        pinned = f", after {self.pinning_seconds:.2f} s once to pin host memory" if self.pinning_seconds else ""
        return (
            f"rehearsal: a checkpoint has {self.bytes_ / 2**20:,.1f} MiB, saves in {self.save_seconds:.2f} s (training "
            f"waits {waits:.2f} s{pinned}), loads and verifies in {self.load_seconds:.2f} s; suggested interval "
            f"{_duration(interval)} at one failure per rank in {_HOURS_BETWEEN_FAILURES:,} h"
        )


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return the interval between saves, in seconds, that minimises the time lost to saves and to failures together.

    Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37; its first
    term is Young's (1974).
    """
    ratio = save_seconds / (2 * seconds_between_failures)
    if ratio >= 1:
        return seconds_between_failures
    first = math.sqrt(2 * save_seconds * seconds_between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def run_rehearsal(  # noqa: PLR0913 - the options of `rehearse`, passed on
    storage: Storage,
    model: nn.Module | LiveTensors,
    optimizer: Optimizer | None,
    ranks: RankGroup,
    *,
    counts: CheckpointCounts = CheckpointCounts(),  # noqa: B008 - frozen
    trained_steps: int = 0,
    state: NonTensorState | None = None,
    companions: Mapping[str, TrainedState] | None = None,
) -> RehearsalReport:
    """Save, verify and load once, and leave nothing behind.

    Args:
        storage: Storage of the checkpoints to come.
        model: The sharded model, or those of its tensors that will be saved.
        optimizer: The optimizer, which may lack state for some parameters or all.
        ranks: The process group that saves use.
        counts: Number of checkpoints that must fit.
        trained_steps: Number of steps made so far, for messages.
        state: What saves write besides tensors.
        companions: Further models that are trained, such as a critic, by name, with their optimizers.

    Raises:
        RehearsalFailed: On all ranks, with the parameter or file and what to do.
    """
    name = ranks.agree(fresh(REHEARSAL, "0"))
    state = state or NonTensorState()
    with ranks.together():
        live = model if isinstance(model, LiveTensors) else hold(model)
        companion_snapshots = {
            companion: take(theirs, _state(theirs, companion_optimizer))
            for companion, (theirs, companion_optimizer) in (companions or {}).items()
        }
        snapshot = take(
            live, _state(live, optimizer), shared=state.shared, rank_state=state.rank_state, assets=state.assets
        )
        snapshot = with_companions(snapshot, companion_snapshots)
    held = ExitStack()  # a start beside this rehearsal leaves it alone
    try:
        with ranks.together():
            if ranks.rank == 0:
                with _writing_to(storage):
                    held.enter_context(Lease(storage, name))
        check_shared(storage, name, ranks)
        report = _round_trip(storage, name, snapshot, ranks, copy_and_pinning_seconds(snapshot))
        with ranks.together():
            if ranks.rank == 0:
                _remove(storage, f"{name}/{TENSORS}")  # its room is that of a checkpoint to come
                _check_space(storage, name, report.bytes_, counts)
                _remove(storage, name)
    except CheckpointError as error:
        before, trained = "before the first step", "Nothing was trained."
        if trained_steps:
            before, trained = f"after step {trained_steps}", f"Nothing was trained after step {trained_steps}."
        raise RehearsalFailed(
            f"The rehearsal {before} failed: {error} {trained} Mend this first, or set "
            "checkpoint.rehearsal: false to go on without checkpoints that are known to work."
        ) from error
    finally:
        if ranks.rank == 0:
            with suppress(OSError):  # after an error, which counts
                storage.remove(name)
        held.close()
    return report


def _remove(storage: Storage, path: str) -> None:
    try:
        storage.remove(path)
    except OSError as error:
        raise RehearsalFailed(
            f"{storage.root} takes files and lets none be removed: {error.strerror or error} ({path}). Older "
            "checkpoints would stay, and fill it. Mend its permissions, or choose another place."
        ) from error


def _state(model_parts: LiveTensors, optimizer: Optimizer | None) -> Optimizer | OptimizerState | None:
    """Return the state that an optimizer will have after its next step, with zeros where it has none yet."""
    if optimizer is None:
        return None
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with_state = {id(parameter) for parameter, state in optimizer.state.items() if state}
    if all(id(parameter) in with_state for parameter in members):
        return optimizer
    inert = inert_state(optimizer, model_parts.parameters)
    if not optimizer.state:
        return inert
    live = collect(optimizer, model_parts.parameters)
    return replace(live, tensors={**inert.tensors, **live.tensors}, values={**inert.values, **live.values})


def copy_and_pinning_seconds(snapshot: Snapshot) -> tuple[float, float]:
    """Return the seconds of a copy to the host, and what a first copy takes more: torch keeps the memory it pins."""
    buffers: dict[str, Tensor] = {}
    began = time.perf_counter()
    if all(tensor.device.type == "cpu" for tensor in snapshot.tensors.values()):
        for name, tensor in snapshot.tensors.items():  # one at a time, since the state may fill half of the host
            staged(replace(snapshot, tensors={name: tensor}), buffers)
        return time.perf_counter() - began, 0.0
    staged(snapshot, buffers)
    first = time.perf_counter() - began
    began = time.perf_counter()
    staged(snapshot, buffers)
    again = time.perf_counter() - began
    return again, max(0.0, first - again)


def _round_trip(
    storage: Storage, name: str, snapshot: Snapshot, ranks: RankGroup, copying: tuple[float, float]
) -> RehearsalReport:
    began = time.perf_counter()
    manifest = commit(snapshot, storage, About(run_id="rehearsal", step=0), ranks, name=name)
    saved = time.perf_counter()
    check_read_back(storage, name, named_manifest(storage, name, ranks), snapshot.tensors, ranks)
    loaded = time.perf_counter()
    times = ranks.agree((saved - began, loaded - saved))
    return RehearsalReport(manifest.bytes_, copying[0], times[0], times[1], outline(snapshot), copying[1])


def check_shared(storage: Storage, folder: str, ranks: RankGroup) -> None:
    """Prove that all ranks see one place: rank 0 writes a random nonce to a new folder, and every rank reads it."""
    nonce = ranks.agree(uuid.uuid4().hex)
    with ranks.together():
        if ranks.rank == 0:
            with _writing_to(storage):
                storage.make(folder)
                storage.put_new(f"{folder}/{NONCE}", nonce.encode())
    try:
        is_seen = storage.read(f"{folder}/{NONCE}").decode() == nonce
    except OSError:
        is_seen = False
    answers = ranks.gather((socket.gethostname(), is_seen))
    ranks.on_first_rank(lambda: _remove(storage, folder))
    blind = [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(answers) if not sees]
    if blind:
        raise RehearsalFailed(
            f"{storage.root} is not one directory for all ranks: what rank 0 on {answers[0][0]} wrote is not there for "
            f"{', '.join(blind[:4])}. Set run.dir to a shared file system, or checkpoint.storage to an object store."
        )


@contextmanager
def _writing_to(storage: Storage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RehearsalFailed(
            f"{storage.root} cannot be written: {error.strerror or error}. Choose another run.dir, or mend its "
            "permissions."
        ) from error


def _check_space(storage: Storage, name: str, size: int, counts: CheckpointCounts) -> None:
    existing = min(counts.keep, counts.replaced)
    needed_bytes = size * (counts.keep + 2 - existing)
    missing = storage.lacks(f"{name}/reserved", needed_bytes)
    if missing is not None:
        extent = f"beside the {existing} that are there" if existing else "in all"
        raise RehearsalFailed(
            f"{storage.root} has no room: a checkpoint takes {size_words(size)}, {counts.keep} are kept and two "
            f"more must fit, {size_words(needed_bytes)} {extent} ({missing}). Free space, lower checkpoint.keep.last, "
            "or choose another run.dir."
        )
