"""Checkpoints for anyone's own loop: functions over a path, a model and an optimizer.

    from holdfast import checkpoint

    checkpoint.rehearse("run", model, optimizer, extra={"step": 0})
    checkpoint.save("run/step-00000100", model, optimizer, extra={"step": 100})
    found = checkpoint.load("run/step-00000100", model, optimizer)

    saving = checkpoint.save_in_background("run/step-00000200", model, optimizer, extra={"step": 200})
    ...                        # train on; the tensors were copied
    manifest = saving.result() # waits; raises what the save failed of, the same on all ranks

Models are plain or sharded by FSDP2; every rank calls each function.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.background import BackgroundSaver
from holdfast.checkpoint.calls import SaveOptions, call, check_extra, encoded_extra, place_of, prepared
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format import verification
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import Snapshot, set_random_state
from holdfast.checkpoint.keep import retention
from holdfast.checkpoint.loading import reader
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.loading.reader import LoadedState
from holdfast.checkpoint.place.object_lease import lease_of
from holdfast.checkpoint.place.storage import open_storage
from holdfast.checkpoint.saving import rehearsal
from holdfast.checkpoint.saving.rehearsal import RehearsalReport
from holdfast.errors import HoldfastError, RankFailed
from holdfast.optim.tagged_json import decode

_NAME = "save_in_background"


class PendingSave:
    """A save that was begun; a process that ends normally finishes it first."""

    def __init__(self, path: str, saver: BackgroundSaver[Manifest]) -> None:
        self.path = path
        self.asked = False
        """Whether this rank has heard what became of it."""
        self._saver = saver
        self._outcome: Manifest | HoldfastError | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has ended it, well or not; other ranks may be a little earlier or later."""
        return self._outcome is not None or self._saver.status != "running"

    def result(self) -> Manifest:
        """Wait for the end and return what was written.

        Raises:
            SaveFailed, DirectoryTaken: As `save`.
        """
        outcome = self.outcome()
        self.asked = True
        if isinstance(outcome, HoldfastError):
            raise outcome
        return outcome

    def outcome(self) -> Manifest | HoldfastError:
        """Wait for the end and return what was written, or why nothing was."""
        if self._outcome is None:
            try:
                self._outcome = self._saver.collect()
            except HoldfastError as error:
                self._outcome = error
        assert self._outcome is not None
        return self._outcome


_saver: BackgroundSaver[Manifest] = BackgroundSaver()
"""One save is in flight at a time, and its buffers serve the next one."""
_newest: list[PendingSave] = []


@atexit.register
def _tell_unheard() -> None:
    """Say at the end what nobody has asked for: a loop's last save may have failed."""
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
    """Copy what `save` would write and return; a thread writes it, over a process group of its own.

    One save is in flight at a time: the one before is waited for. Ask for the result before the process group is
    destroyed.

    Args:
        path, model, optimizer, extra, timeout_minutes: As in `save`.
        options: rank_extra, assets, frozen and parent, as in `save`.

    Raises:
        SaveFailed, DirectoryTaken: The save before failed, and nobody had asked for its result; on all ranks. Nothing
            was begun.
        UnsavableExtra, UnsavableOptimizer: On all ranks; something on one of them has no written form.
    """
    before = _newest[-1] if _newest else None
    outcome = None if before is None else before.outcome()
    with call(_NAME, timeout_minutes, SaveFailed, "background") as (ranks, _):
        failure = outcome if isinstance(outcome, HoldfastError) else None
        answers = ranks.gather((failure, before is None or before.asked))
        _newest.clear()
        first = next((error for error, _ in answers if error is not None), None)
        if first is not None and not all(was_read for _, was_read in answers):
            raise first
        prepared_save = prepared(ranks, path, model, optimizer, extra, **options)

    def write(copy: Snapshot) -> Manifest:
        with call(_NAME, timeout_minutes, SaveFailed, "background") as (_, reached):
            return prepared_save.committed(copy, ranks, reached)

    _saver.start(prepared_save.snapshot, write)
    _newest.append(PendingSave(path, _saver))
    return _newest[0]


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held besides model and optimizer."""

    extra: Any
    rank_extra: Any
    """Of this rank; None if the checkpoint was written by another number of ranks, or on another mesh."""
    exact: bool
    """Whether random state was restored too: ranks and mesh are the same."""
    notes: tuple[str, ...]
    """Declared deviations, and hyper-parameters that differ."""
    manifest: Manifest


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
    """Write a checkpoint directory, whole or not at all; a name that is taken is refused.

    Args:
        path: A directory or a URL such as s3://bucket/run/step-00000100.
        model: Parameters and stored buffers are saved under their canonical names.
        optimizer: Its state is saved as it is; what is absent stays absent.
        extra: The same on every rank: numbers, texts, lists, tuples, dictionaries, dtypes, small tensors.
        rank_extra: This rank's own, beside the state of its random generators.
        assets: Files to lay beside, rank 0's.
        frozen: Also parameters that are not trained; without them a load leaves them as they are.
        parent: Of the checkpoint that this one continues from, as `save`, `load(...).manifest` and `verify` return it;
            recorded by hash and step. Nobody else knows it: a directory may hold checkpoints of several loops.
        timeout_minutes: Longest wait for another rank.

    Raises:
        SaveFailed: On all ranks, with the first cause, or the rank that did not come; nothing was left behind.
        DirectoryTaken: On all ranks; another job is writing this name to an object store.
        UnsavableExtra, UnsavableOptimizer: On all ranks; something on one of them has no written form.
    """
    with call("save", timeout_minutes, SaveFailed) as (ranks, reached):
        prepared_save = prepared(
            ranks,
            path,
            model,
            optimizer,
            extra,
            rank_extra=rank_extra,
            assets=assets,
            frozen=frozen,
            parent=parent,
        )
        return prepared_save.committed(prepared_save.snapshot, ranks, reached)


def load(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    declared: Declared | None = None,
    hyperparameters: Literal["live", "checkpoint"] = "live",
    timeout_minutes: float = 30.0,
) -> Restored:
    """Verify a checkpoint and load it, at any number of ranks; nothing live is touched before everything was verified.

    Args:
        path: As in `save`.
        model, optimizer: Built as for training; live gradients do not matter.
        declared: What may differ.
        hyperparameters: Whether betas and the like stay as they are or come from the checkpoint.
        timeout_minutes: Longest wait for another rank.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: On all ranks; nothing was touched.
        RankFailed: Another rank did not come; it is named.
    """
    with call("load", timeout_minutes, RankFailed) as (ranks, _):
        storage, name = ranks.on_all_ranks(lambda: place_of(path))
        loaded: LoadedState = reader.load_state(
            storage,
            name,
            model,
            optimizer,
            ranks,
            declared=declared,
            hyperparameters=hyperparameters,
            check=check_extra,
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
    """Compare a checkpoint with its manifest; needs no other rank.

    Args:
        path: As in `save`.
        level: names (and sizes), files (their hashes), or tensors (every chunk, as DCP stored it).

    Raises:
        NoCheckpoint: There is none.
        CheckpointCorrupt: Something differs; the file or tensor is named.
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
    """Save, verify and load once in a directory of checkpoints, and leave nothing behind.

    Args:
        path: The directory that checkpoints will be in.
        model, optimizer: As for training; nothing in them changes.
        extra, rank_extra, assets: As `save` will be given them.
        keep: Checkpoints that will be kept; two more must fit.
        timeout_minutes: Longest wait for another rank.

    Raises:
        RehearsalFailed: On all ranks, with the parameter or file and what to do.
        UnsavableExtra: A type in `extra` has no written form; on all ranks.
        RankFailed: Another rank did not come; it is named.
    """
    with call("rehearse", timeout_minutes, RankFailed) as (ranks, _):
        with ranks.together():
            state = rehearsal.NonTensorState(
                {"extra": encoded_extra(extra)}, {"extra": encoded_extra(rank_extra)}, assets or {}
            )
        return rehearsal.run_rehearsal(
            open_storage(path), model, optimizer, ranks, counts=rehearsal.CheckpointCounts(keep), state=state
        )


def clean(path: str) -> None:
    """Remove what saves that were killed left half written in a directory of checkpoints; needs no other rank.

    Nobody can see whether such a save still goes on: call it where none does, as before the first save of a loop.

    Args:
        path: The directory that checkpoints are in, or its URL.

    Raises:
        DirectoryTaken: A run of Holdfast holds it.
    """
    storage = open_storage(path)
    if storage.exists(""):
        with lease_of(storage):
            retention.remove_leftovers(storage, wait=True)
