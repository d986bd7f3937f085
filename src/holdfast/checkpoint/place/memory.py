"""Allocate memory for large reads, and say which read lacked it."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.checkpoint.errors import CheckpointUnreadable
from holdfast.files import size_words
from holdfast.parallel.failure.classify import is_out_of_memory


def no_memory_for(path: str, size: int | None = None) -> CheckpointUnreadable:
    """Return the error for data that could not be read for lack of memory.

    Args:
        path: The file or checkpoint.
        size: Number of bytes to be read, if known.
    """
    amount = "it" if size is None else f"{size_words(size)} of it"
    return CheckpointUnreadable(
        f"{path} cannot be read: {os.uname().nodename} has no memory left for {amount}. Nothing is known of its bytes; "
        "free memory, raise the limit of the job, or use more ranks."
    )


_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14


def new_memory(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor to read a file into, backed by huge pages where the system has them.

    With pages of 4 KiB, most of the time of a read into new memory is spent in page faults.

    Raises:
        CheckpointUnreadable: There is no memory; `path` is the file to be read.
    """
    size = math.prod(shape) * dtype.itemsize
    with memory_for(path, size):
        tensor = torch.empty(shape, dtype=dtype)
    first = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + size - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if length > 0 and advise is not None:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return tensor


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, which the caller keeps alive; writes change the tensor."""
    # Memory that `Tensor.numpy` has shown once can never be given away again, as parallel/host_memory.py does.
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def memory_for(path: str, size: int | None = None) -> Iterator[None]:
    """Raise CheckpointUnreadable where memory runs out; arguments as `no_memory_for`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise no_memory_for(path, size) from error


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while many long-lived objects are created; it would scan them repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
