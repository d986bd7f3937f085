"""A machine that is short of memory says nothing about a checkpoint; bytes that ask for more than they hold do."""

from __future__ import annotations

from holdfast.checkpoint.errors import CheckpointUnreadable


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory was not given: Python's own, or that of torch's allocator."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def no_memory_for(where: str, size: int) -> CheckpointUnreadable:
    """Return the error for what could not be read into memory.

    Args:
        where: The file.
        size: Of what was read of it, in bytes.
    """
    return CheckpointUnreadable(
        f"{where} cannot be read: this machine has no memory left for {size / 2**20:,.1f} MiB of it. Nothing is known "
        "of its bytes; free memory, raise the limit of the job, or use more ranks."
    )
