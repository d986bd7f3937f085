"""Shared parts of saves inside other trainers: rewriting an existing name, and finding the newest complete save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.verification import verified_manifest
from holdfast.checkpoint.place.layout import STAGING, TRASH
from holdfast.checkpoint.place.storage import exchange, open_storage
from holdfast.errors import HoldfastError, UserError
from holdfast.parallel.collectives import RankGroup


class UnsuitableTrainer(UserError):  # noqa: N818 - the name says what is wrong
    """A trainer whose state cannot be saved by Holdfast; raised before anything is trained."""


def is_first() -> bool:
    """Return whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def save_again(path: Path, model: nn.Module, optimizer: Optimizer | None, extra: Any, **options: Any) -> Manifest:
    """Save, and put what had the name away once the new one is whole; all ranks call this.

    A checkpoint of Holdfast is never written over. Where a trainer writes a name a second time, after a resume or as
    its `last`, the new one is written beside and the two names are exchanged in one step.

    Args:
        path: The checkpoint's directory.
        model, optimizer, extra, others: As `checkpoint.save` takes them.

    Raises:
        SaveFailed, CheckpointCorrupt: On all ranks; what had the name still has it.
    """
    ranks = RankGroup()
    taken = ranks.agree(path.exists() or path.is_symlink())
    target = path.with_name(f"{path.name}.new") if taken else path
    if taken:
        ranks.on_first_rank(lambda: shutil.rmtree(target, ignore_errors=True))  # of a save that was killed
    manifest = checkpoint.save(str(target), model, optimizer, extra, **options)
    verified_manifest(open_storage(str(target.parent)), target.name, ranks)
    if taken:
        ranks.on_first_rank(lambda: _give_name(target, path))
    return manifest


def _give_name(new: Path, path: Path) -> None:
    if path.is_symlink() or path.is_file() or not exchange(new, path):
        old = path.with_name(f"{TRASH}{path.name}")
        path.rename(old)
        new.rename(path)
        new = old
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new, ignore_errors=True)
    else:
        new.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint is there and every byte is what was written; needs no other rank."""
    try:
        checkpoint.verify(str(path), "files")
    except (CheckpointError, NoCheckpoint, HoldfastError, OSError):
        return False
    return True


def clear_leftovers(folder: Path, name: str) -> None:
    """Remove what killed saves of a name left in a directory; rank 0 calls this, where no save goes on."""
    for path in list(folder.glob("*")) + list(folder.glob(".*")):
        if path.is_dir() and (path.name.startswith((STAGING, TRASH)) or path.name == f"{name}.new"):
            shutil.rmtree(path, ignore_errors=True)
