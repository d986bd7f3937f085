"""Checkpoints for anyone's own loop: four functions over a path, a model and an optimizer.

    from holdfast import checkpoint

    checkpoint.rehearse("run", model, optimizer, extra={"step": 0})
    checkpoint.save("run/step-00000100", model, optimizer, extra={"step": 100})
    found = checkpoint.load("run/step-00000100", model, optimizer)

Models are plain or sharded by FSDP2; every rank calls each function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint import reader, rehearsal, verification
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.layout import step_of
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.matching import Declared
from holdfast.checkpoint.reader import Loaded
from holdfast.checkpoint.rehearsal import Report
from holdfast.checkpoint.snapshot import hold, mesh_of, set_random_state, take
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.checkpoint.waiting import late_ranks_named
from holdfast.checkpoint.writer import About, commit
from holdfast.config.versions import versions
from holdfast.errors import HoldfastError, RankFailed, UserError
from holdfast.optim.tagged import UnknownType, decode, encode
from holdfast.parallel.broken import broken_by_peer
from holdfast.parallel.collectives import ProcessExchange


class UnsavableExtra(UserError):  # noqa: N818 - the name says what is wrong
    """`extra` holds a type that has no written form."""


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
        UnsavableExtra, UnsavableOptimizer: On all ranks; something on one of them has no written form.
    """
    with _call("save", timeout_minutes, SaveFailed) as (ranks, reached):
        with ranks.together():
            storage, name = _place(path)
            snapshot = take(
                hold(model, frozen=frozen),
                optimizer,
                shared={"extra": _tagged(extra)},
                rank_state={"extra": _tagged(rank_extra)},
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
        return commit(snapshot, storage, about, ranks, name=name, reached=reached)


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
    with _call("load", timeout_minutes, RankFailed) as (ranks, _):
        with ranks.together():
            storage, name = _place(path)
        found: Loaded = reader.load(
            storage,
            name,
            model,
            optimizer,
            ranks,
            declared=declared,
            hyperparameters=hyperparameters,
            check=_check_extra,
        )
    own = found.rank_state
    if own is not None:
        set_random_state(own["random"])
    return Restored(
        decode(found.shared.get("extra")),
        None if own is None else decode(own.get("extra")),
        own is not None,
        found.notes,
        found.manifest,
    )


def verify(path: str, level: verification.Level = "tensors") -> Manifest:
    """Compare a checkpoint with its manifest; needs no other rank.

    Args:
        path: As in `save`.
        level: names (and sizes), files (their hashes), or tensors (every chunk, read through DCP).

    Raises:
        NoCheckpoint: There is none.
        CheckpointCorrupt: Something differs; the file or tensor is named.
    """
    storage, name = _place(path)
    return verification.verify(storage, name, level)


def rehearse(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    rank_extra: Any = None,
    assets: Mapping[str, bytes] | None = None,
    keep: int = 3,
    timeout_minutes: float = 30.0,
) -> Report:
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
    with _call("rehearse", timeout_minutes, RankFailed) as (ranks, _):
        with ranks.together():
            beside = rehearsal.Beside({"extra": _tagged(extra)}, {"extra": _tagged(rank_extra)}, assets or {})
        return rehearsal.rehearse(open_storage(path), model, optimizer, ranks, keep=keep, beside=beside)


def _place(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's path into the storage it is in and its name there."""
    scheme, colon, rest = str(path).rpartition("://")
    whole = PurePosixPath(rest)
    return open_storage(f"{scheme}{colon}{whole.parent}"), whole.name


@contextmanager
def _call(
    name: str, timeout_minutes: float, raised: type[HoldfastError]
) -> Iterator[tuple[ProcessExchange, Callable[[str], None]]]:
    """Give the ranks that take part, and what is told each phase."""
    try:
        with late_ranks_named(name, raised) as reached:
            yield exchange_of(dist.group.WORLD if dist.is_initialized() else None, timeout_minutes), reached
    except (SaveFailed, RankFailed) as error:
        if error.__cause__ is not None and broken_by_peer(error.__cause__):
            exchange_of.cache_clear()  # its sockets are closed
        raise


@cache
def exchange_of(world: object, timeout_minutes: float) -> ProcessExchange:  # noqa: ARG001 - one group per world
    """Return the ranks of a world; a process group is made once and kept."""
    return ProcessExchange(timedelta(minutes=timeout_minutes))


def _check_extra(shared: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
    decode((shared if rank_state is None else rank_state).get("extra"))


def _tagged(value: Any) -> Any:
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableExtra(
            f"extra holds a {error}, which has no written form. Use numbers, texts, lists, tuples, dictionaries, "
            "dtypes or small tensors; per-tensor state belongs into the model or the optimizer."
        ) from None
