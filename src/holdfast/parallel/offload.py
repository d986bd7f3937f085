"""Memory of tensors that nobody reads for a while, moved to the host and back.

The memory goes and the tensors stay: parameters, DTensors, the flat views that FSDP2 gathers from, and the keys of an
optimizer's state are the same objects before, meanwhile and after. Who reads one meanwhile reads nothing, or crashes:
hence `wake` comes before every reader, and a reader on another thread calls `stay`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class _Resting(NamedTuple):
    storage: torch.UntypedStorage
    host: Tensor
    """Its bytes."""


@dataclass
class Residency:
    """What rests in host memory, by the name of its part."""

    _resting: dict[str, list[_Resting]] = field(default_factory=dict)
    _stays: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def rests(self, *parts: str) -> bool:
        """Return whether something of these parts is in host memory; of any, where none is named."""
        return any(self._resting.get(part) for part in parts or tuple(self._resting))

    def rest(self, part: str, tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> None:
        """Move memory to the host, once where tensors share it, and leave what is there already.

        Args:
            part: What it is woken by.
            tensors: Of any class; those that hold others are taken apart.
            besides: Tensors whose memory stays, although some of `tensors` share it.
        """
        with self._lock:
            if self._stays:
                return
            storages = storages_of(tensors)
            staying_keys = storages_of(besides).keys()
            on_host = all(storage.device.type == "cpu" for storage in storages.values())
            resting = self._resting.setdefault(part, [])
            for key, storage in storages.items():
                # Beside a device, counters of steps and the like are on the host by intent.
                moves = on_host or storage.device.type != "cpu"
                if storage.nbytes() == 0 or key in staying_keys or not moves or not storage.resizable():
                    continue
                resting.append(_Resting(storage, _copy(storage)))
                storage.resize_(0)

    def wake(self, *parts: str) -> None:
        """Bring these parts back, all where none is named; every bit is as it was."""
        with self._lock:
            for part in parts or tuple(self._resting):
                resting = self._resting.get(part, [])
                while resting:
                    storage, host = resting[-1]
                    storage.resize_(host.numel())
                    _bytes_of(storage).copy_(host)
                    resting.pop()  # only now: if memory is short, what did not come back can be asked for again

    def stay(self) -> None:
        """Bring everything back, for good: another thread reads it, or may."""
        with self._lock:
            self._stays = True
            self.wake()


def storages_of(tensors: Iterable[Tensor]) -> Mapping[int, torch.UntypedStorage]:
    """Return the memory of tensors, each piece once, whatever shares it."""
    storages = (part.untyped_storage() for tensor in tensors for part in _plain(tensor))
    return {storage._cdata: storage for storage in storages}  # noqa: SLF001 - the identity that torch itself goes by


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what holds a tensor's memory: of a sharded one its shard, of a quantised one its parts."""
    wrapped: Any = tensor
    if isinstance(tensor, DTensor):
        yield from _plain(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(wrapped):
        for name in wrapped.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: torch.UntypedStorage) -> Tensor:
    source = _bytes_of(storage)
    pinned = storage.device.type == "cuda"
    # The copy is waited for: the memory is given away right after.
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).copy_(source)
