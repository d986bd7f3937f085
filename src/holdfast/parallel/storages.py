"""The storages behind tensors of any class, DTensors and tensor subclasses included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages_of(tensors: Iterable[Tensor]) -> Mapping[int, torch.UntypedStorage]:
    """Return the storages of tensors by identity, each once however many tensors share it."""
    storages = (plain.untyped_storage() for tensor in tensors for plain in _plain(tensor))
    return {storage._cdata: storage for storage in storages}  # noqa: SLF001 - the identity that torch itself goes by


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's memory: the local shard of a DTensor, the fields of a subclass."""
    wrapped: Any = tensor
    if isinstance(tensor, DTensor):
        # Not `to_local()`, which is recorded by autograd and returns a view.
        yield from _plain(tensor._local_tensor)
    # Torch's own protocol of tensors that wrap tensors, such as quantised ones; no public name exists for the
    # test.
    elif is_traceable_wrapper_subclass(wrapped):
        for name in wrapped.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a storage [nbytes] (uint8), which share its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
