"""Exceptions about checkpoints; the base class says whether the user must act or the run can be restarted."""

from __future__ import annotations

from holdfast.errors import HoldfastError, RunStopped, UserError


class CheckpointError(HoldfastError):
    """The root of checkpoint errors."""


class SaveFailed(CheckpointError, RunStopped):
    """A save was not committed; earlier checkpoints are intact. Raised with the same message on all ranks."""

    exit_code = RunStopped.exit_code


class PlaceLost(SaveFailed):
    """Another job has taken over the directory of checkpoints, whose files may be that job's. Raised on all ranks."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's bytes are not the ones that were written; the tensor or file is named."""


class TensorsDiffer(CheckpointCorrupt):
    """All files of a checkpoint have the recorded hashes, but a tensor in them differs from what was saved."""


class CheckpointUnreadable(CheckpointError):
    """A file could not be read because of the disk, the network or a lack of memory; its bytes may be correct."""


class NoCheckpoint(UserError):
    """A path holds no checkpoint of Holdfast; it may hold another system's."""


class CheckpointMismatch(UserError):
    """A checkpoint is intact but does not match the model or optimizer, and the difference was not declared."""


class DirectoryTaken(UserError):
    """Another job is writing to the run directory."""


class UnsavableExtra(UserError):
    """`extra` holds a value of a type that cannot be written to a checkpoint."""
