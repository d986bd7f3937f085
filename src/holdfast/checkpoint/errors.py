"""Errors of checkpoints: the base class tells whether the user must act or the run can be started again."""

from __future__ import annotations

from holdfast.errors import HoldfastError, RunStopped, UserError


class CheckpointError(HoldfastError):
    """The root of the errors about a checkpoint's files."""


class SaveFailed(CheckpointError, RunStopped):
    """A save that was not committed, the same error on all ranks; earlier checkpoints are intact."""

    exit_code = RunStopped.exit_code


class PlaceLost(SaveFailed):
    """A directory of checkpoints that another job has taken over, the same error on all ranks."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint whose bytes are not those that were written; the message names the file or the tensor."""


class TensorsDiffer(CheckpointCorrupt):
    """A checkpoint whose files have the recorded hashes, and in which a tensor differs from what was saved."""


class CheckpointUnreadable(CheckpointError):
    """A file that the disk, the network or a lack of memory kept from being read; its bytes may be right."""


class NoCheckpoint(UserError):
    """A path without a checkpoint of Holdfast; it may hold another system's."""


class CheckpointMismatch(UserError):
    """A whole checkpoint that does not fit the model or the optimizer, by a difference that was not declared."""


class DirectoryTaken(UserError):
    """A directory of checkpoints that another job writes to."""


class UnsavableExtra(UserError):
    """An `extra` with a value of a type that has no written form."""
