"""Save, load and verify checkpoints in your own training loop.

Models are plain or sharded by FSDP2. All ranks must call each function, except `verify` and `clean`, and raise the
same error.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, TypedDict, Unpack

from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.background import BackgroundSaver, PendingSave
from holdfast.checkpoint.errors import SaveFailed, UnsavableExtra
from holdfast.checkpoint.format import verification
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.snapshot import Snapshot, hold, mesh_of, set_random_state, take
from holdfast.checkpoint.keep import retention
from holdfast.checkpoint.loading import reader
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.loading.reader import LoadedState
from holdfast.checkpoint.place.layout import step_of
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.checkpoint.saving import rehearsal
from holdfast.checkpoint.saving.agreement import together_in_phase
from holdfast.checkpoint.saving.rehearsal import RehearsalReport
from holdfast.checkpoint.saving.writer import commit
from holdfast.config.versions import versions
from holdfast.errors import HoldfastError, RankFailed
from holdfast.optim.tagged_json import UnknownType, decode, encode
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.joint_calls import joint_call


class SaveOptions(TypedDict, total=False):
    """Optional arguments that `save` and `save_in_background` share."""

    rank_extra: Any
    assets: Mapping[str, bytes] | None
    frozen: bool
    parent: Manifest | None


def save(  # noqa: PLR0913 - what is saved, and what is said of it
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    rank_extra: Any = None,
    assets: Mapping[str, bytes] | None = None,
    frozen: bool = True,
    parent: Manifest | None = None,
    timeout_minutes: float = 30.0,
) -> Manifest:
    """Write a checkpoint atomically.

    All ranks call this together. An existing checkpoint is never overwritten.

    Args:
        path: A directory or a URL such as s3://bucket/run/step-00000100, whose last part names the checkpoint.
        model: The model, plain or sharded by FSDP2. Parameters and persistent buffers are saved by canonical name.
        optimizer: The optimizer; parameters without state are saved without state. Default: None, no optimizer.
        extra: A value that is equal on all ranks: numbers, texts, lists, tuples, dictionaries, dtypes, small tensors.
        rank_extra: A value of this rank, of the same types, saved beside the state of its random generators.
        assets: Contents of further files by name, taken from rank 0. Default: None, no files.
        frozen: Whether to save parameters that are not trained; if not, a load leaves them as they are. Default: True.
        parent: Manifest of the checkpoint that this one continues from, as `save`, `load(...).manifest` and `verify`
            return it. A directory may hold checkpoints of several loops, so it is not looked for. Default: None.
        timeout_minutes: Longest wait for another rank, in minutes.

    Returns:
        The manifest of the checkpoint.

    Raises:
        SaveFailed: The save failed on a rank, a rank did not arrive, or the path exists; nothing was left behind.
        DirectoryTaken: Another job is writing this name.
        UnsavableExtra: `extra` or `rank_extra` holds a value of a type that cannot be written.
        UnsavableOptimizer, ModelError: The optimizer or the model holds a tensor or value that cannot be written.
        ConfigError: The URL cannot be opened.
    """
    options = SaveOptions(rank_extra=rank_extra, assets=assets, frozen=frozen, parent=parent)
    with joint_call("checkpoint.save", timeout_minutes, SaveFailed) as (ranks, reached):
        prepared = _prepared(ranks, path, model, optimizer, extra, **options)
        return prepared.committed(prepared.snapshot, ranks, reached)


_saver: BackgroundSaver[Manifest] = BackgroundSaver()
"""The one background save at a time; its host buffers are reused by the next."""
_newest: list[PendingSave] = []


@atexit.register
def _tell_unheard() -> None:
    """Print at exit the error of a failed save whose outcome nobody has asked for, as of a loop's last save."""
    for saving in _newest:
        outcome = saving.outcome()
        if isinstance(outcome, HoldfastError) and not saving.asked:
            print(f"{saving.path} was not saved: {outcome}", file=sys.stderr, flush=True)


def save_in_background(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    timeout_minutes: float = 30.0,
    **options: Unpack[SaveOptions],
) -> PendingSave:
    """Copy the tensors of a checkpoint, and write the copy on a thread.

    All ranks call this together. The call returns when the copy is made; the thread writes over a process group of its
    own. One save runs at a time, so this call waits for the previous one. Ask for the result before the default process
    group is destroyed.

    Args:
        path: A directory or a URL such as s3://bucket/run/step-00000100, whose last part names the checkpoint.
        model: The model, plain or sharded by FSDP2.
        optimizer: The optimizer. Default: None, no optimizer.
        extra: A value that is equal on all ranks, as in `save`.
        timeout_minutes: Longest wait for another rank, in minutes.
        options: The arguments rank_extra, assets, frozen and parent of `save`.

    Returns:
        The pending save, whose `result()` waits for the manifest and raises the error of a failed save.

    Raises:
        SaveFailed, DirectoryTaken: The previous save failed, and its result was not asked for, or a rank did not
            arrive. No new save was started.
        UnsavableExtra, UnsavableOptimizer, ModelError: The state has a value that cannot be written, as in `save`.
    """
    before = _newest[-1] if _newest else None
    outcome = None if before is None else before.outcome()
    call = partial(joint_call, "checkpoint.save_in_background", timeout_minutes, SaveFailed, "background")
    with call() as (ranks, _):
        failure = outcome if isinstance(outcome, HoldfastError) else None
        answers = ranks.gather((failure, before is None or before.asked))
        _newest.clear()
        first = next((error for error, _ in answers if error is not None), None)
        if first is not None and not all(was_read for _, was_read in answers):
            raise first
        prepared = _prepared(ranks, path, model, optimizer, extra, **options)

    def write(copy: Snapshot) -> Manifest:
        with call() as (_, reached):
            return prepared.committed(copy, ranks, reached)

    _saver.start(prepared.snapshot, write)
    _newest.append(PendingSave(path, _saver))
    return _newest[0]


@dataclass(frozen=True)
class Restored:
    """The result of `load`, besides the model and the optimizer that it fills."""

    extra: Any
    """Value that was given to `save`."""
    rank_extra: Any
    """Value that this rank gave to `save`; None if the checkpoint was written with other ranks or on another mesh."""
    exact: bool
    """Whether the random state was restored too, because ranks and mesh are the same."""
    notes: tuple[str, ...]
    """Declared deviations, and hyper-parameters that differ."""
    manifest: Manifest
    """Manifest of the checkpoint."""


def load(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    declared: Declared | None = None,
    hyperparameters: Literal["live", "checkpoint"] = "live",
    timeout_minutes: float = 30.0,
) -> Restored:
    """Verify a checkpoint and load it into a model and an optimizer.

    All ranks call this together; their number may differ from that of the save. Model and optimizer are not changed
    before all bytes that are needed have been read and verified.

    Args:
        path: Directory or URL of the checkpoint.
        model: The model to fill, plain or sharded by FSDP2 in any way.
        optimizer: The optimizer to fill; gradients do not matter. Default: None, the model alone.
        declared: Patterns of parameters that may differ between checkpoint and model. Default: None, no difference.
        hyperparameters: Whether betas, epsilon and the like stay as they are ("live", the default) or come from the
            checkpoint ("checkpoint").
        timeout_minutes: Longest wait for another rank, in minutes.

    Returns:
        The values that `save` was given, and notes about the load.

    Raises:
        NoCheckpoint, OtherFormat: The path holds no checkpoint, or one of another version's format.
        CheckpointCorrupt, CheckpointUnreadable: Bytes differ from those that were written, or cannot be read.
        CheckpointMismatch: The checkpoint does not fit the model or optimizer, in a way that was not declared.
        RankFailed: Another rank did not arrive; the message names it.
    """
    with joint_call("checkpoint.load", timeout_minutes, RankFailed) as (ranks, _):
        storage, name = ranks.on_all_ranks(lambda: place_of(path))
        loaded: LoadedState = reader.load_state(
            storage,
            name,
            model,
            optimizer,
            ranks,
            declared=declared,
            hyperparameters=hyperparameters,
            check=_check_extra,
        )
    rank_state = loaded.rank_state
    if rank_state is not None:
        set_random_state(rank_state["random"])
    return Restored(
        decode(loaded.shared.get("extra")),
        None if rank_state is None else decode(rank_state.get("extra")),
        rank_state is not None,
        loaded.notes,
        loaded.manifest,
    )


def verify(path: str, level: verification.Level = "tensors") -> Manifest:
    """Compare a checkpoint with its manifest; a single process may call this.

    Args:
        path: Directory or URL of the checkpoint.
        level: "names" compares names and sizes of files, "files" also their hashes, "tensors", the default, also the
            header of every file of tensors and every chunk in it.

    Returns:
        The manifest of the checkpoint.

    Raises:
        NoCheckpoint, OtherFormat: The path holds no checkpoint, or one of another version's format.
        CheckpointCorrupt, CheckpointUnreadable: A file or tensor differs, or cannot be read; the message names it.
    """
    storage, name = place_of(path)
    return verification.verify_checkpoint(storage, name, level)


def rehearse(  # noqa: PLR0913 - a public verb; its options are keywords
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    rank_extra: Any = None,
    assets: Mapping[str, bytes] | None = None,
    keep: int = 3,
    timeout_minutes: float = 30.0,
) -> RehearsalReport:
    """Save, verify, load and delete a trial checkpoint before training, all ranks together.

    Args:
        path: The directory or URL in which checkpoints will be saved.
        model: The model of later saves; nothing in it changes.
        optimizer: The optimizer of later saves; nothing in it changes. Default: None, no optimizer.
        extra: A value of the types that `save` takes, equal on all ranks.
        rank_extra: A value of this rank, of the same types.
        assets: Contents of further files by name. Default: None, no files.
        keep: Number of checkpoints that will be kept; there must be room for two more.
        timeout_minutes: Longest wait for another rank, in minutes.

    Returns:
        Size and times of the trial checkpoint, in bytes and seconds.

    Raises:
        RehearsalFailed: The trial failed; the message names the parameter or file and what to do.
        UnsavableExtra, UnsavableOptimizer, ModelError: The state has a value that cannot be written, as in `save`.
        RankFailed: Another rank did not arrive; the message names it.
    """
    with joint_call("checkpoint.rehearse", timeout_minutes, RankFailed) as (ranks, _):
        with ranks.together():
            state = rehearsal.NonTensorState(
                {"extra": _encoded_extra(extra)}, {"extra": _encoded_extra(rank_extra)}, assets or {}
            )
        return rehearsal.run_rehearsal(
            open_storage(path), model, optimizer, ranks, counts=rehearsal.CheckpointCounts(keep), state=state
        )


def clean(path: str) -> None:
    """Remove the unfinished files of killed saves from a directory; a single process may call this.

    A save that is still running, of this or another process, is left alone.

    Args:
        path: The directory or URL that contains the checkpoints.

    Raises:
        DirectoryTaken: A run of Holdfast is using the directory; nothing was removed.
    """
    storage = open_storage(path)
    if storage.exists(""):
        with Lease(storage):
            retention.remove_leftovers(storage, wait=True)


def place_of(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's path into the storage it is in and its name there."""
    scheme, colon, location = str(path).rpartition("://")
    full_path = PurePosixPath(location)
    return open_storage(f"{scheme}{colon}{full_path.parent}"), full_path.name


def _encoded_extra(value: Any) -> Any:
    """Return `extra` or `rank_extra` as tagged JSON.

    Raises:
        UnsavableExtra: It holds a value of a type that cannot be written.
    """
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableExtra(
            f"extra holds a {error}, which has no written form. Use numbers, texts, lists, tuples, dictionaries, "
            "dtypes or small tensors; per-tensor state belongs into the model or the optimizer."
        ) from None


def _check_extra(shared: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
    """Raise if the `extra` of a checkpoint cannot be decoded; called before anything live is changed."""
    decode((shared if rank_state is None else rank_state).get("extra"))


@dataclass(frozen=True)
class PreparedSave:
    """The checked arguments of a save: where to write, the live tensors, and the fields of the manifest."""

    storage: Storage
    name: str
    snapshot: Snapshot
    """Snapshot of the live tensors."""
    about: About

    def committed(self, snapshot: Snapshot, ranks: RankGroup, reached: Callable[[str], None]) -> Manifest:
        """Write `self.snapshot` or a copy of it as a checkpoint; all ranks call this together."""
        lease = Lease(self.storage, self.name, notify=lambda message: print(message, file=sys.stderr, flush=True))

        def entered(phase: str) -> None:
            reached(phase)
            if phase == "publish":  # which rank 0 alone enters; the others wait for its outcome
                lease.check()

        with ExitStack() as stack:
            with together_in_phase(ranks, "begin"):
                if ranks.rank == 0:
                    stack.enter_context(lease)
            return commit(snapshot, self.storage, self.about, ranks, name=self.name, reached=entered)


def _prepared(  # noqa: PLR0913 - the arguments of `save`
    ranks: RankGroup,
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    *,
    rank_extra: Any = None,
    assets: Mapping[str, bytes] | None = None,
    frozen: bool = True,
    parent: Manifest | None = None,
) -> PreparedSave:
    """Check the arguments of `save` and take a snapshot of the live tensors.

    Raises:
        UnsavableExtra, UnsavableOptimizer: On all ranks.
    """
    with ranks.together():
        storage, name = place_of(path)
        snapshot = take(
            hold(model, frozen=frozen),
            optimizer,
            shared={"extra": _encoded_extra(extra)},
            rank_state={"extra": _encoded_extra(rank_extra)},
            assets=assets,
        )
    about = About(
        run_id=storage.root,
        step=step_of(name) or 0,
        parent=None if parent is None else parent.hash,
        parent_step=None if parent is None else parent.step,
        mesh=mesh_of(model),
        versions=versions(),
    )
    return PreparedSave(storage, name, snapshot, about)
