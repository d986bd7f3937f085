"""What can go wrong with a checkpoint, by who must act."""

from __future__ import annotations

from holdfast.errors import HoldfastError, RunStopped, UserError


class CheckpointError(HoldfastError):
    """The root of checkpoint errors."""


class SaveFailed(CheckpointError, RunStopped):
    """A save did not commit; earlier checkpoints are untouched. The same on all ranks."""

    exit_code = RunStopped.exit_code


class PlaceLost(SaveFailed):
    """Another job has taken over the place of the checkpoints; what lies there is its own. The same on all ranks."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's bytes are not the ones that were written; the tensor or file is named."""


class TensorsDiffer(CheckpointCorrupt):
    """The files of a checkpoint have their hashes, and a tensor in them is not what was saved."""


class CheckpointUnreadable(CheckpointError):
    """A file could not be read, which says nothing about its bytes: the disk, the network or memory was at fault."""


class NoCheckpoint(UserError):
    """A path holds no checkpoint of ours, or one of somebody else's."""


class CheckpointMismatch(UserError):
    """A checkpoint is whole but does not fit what it is loaded into, and the difference was not declared."""


class DirectoryTaken(UserError):
    """Another job is writing to the run directory."""
