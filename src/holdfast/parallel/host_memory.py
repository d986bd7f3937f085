"""Host memory of a sharded model: tensors that are offloaded for a while.

Offloading frees the storage of a tensor and keeps the tensor object. Parameters, DTensors, the flat views that FSDP2
gathers from, and the keys of an optimizer's state remain the same objects. Reading an offloaded tensor returns garbage
or crashes: call `restore` before every read, and `restore_for_good` where another thread may read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.parallel.storages import bytes_of, storages_of


class _Offloaded(NamedTuple):
    storage: torch.UntypedStorage
    host: Tensor
    """Its bytes."""


@dataclass
class HostOffload:
    """Tensors that are offloaded to host memory, under the labels by which they are restored."""

    parts: set[str] = field(default_factory=set)
    """Labels under which something is offloaded now."""
    _offloaded: dict[str, list[_Offloaded]] = field(default_factory=dict)
    _closed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def offload(self, label: str, tensors: Iterable[Tensor], staying: Iterable[Tensor] = ()) -> None:
        """Move the storages of tensors to the host, each once where tensors share it.

        On a machine with a GPU, tensors that are in host memory already are skipped.

        Args:
            label: Name under which `restore` finds them.
            tensors: Tensors of any class, DTensors and tensor subclasses included.
            staying: Tensors whose storage must not be moved, even where some of `tensors` share it.
        """
        with self._lock:
            if self._closed:
                return
            storages = storages_of(tensors)
            staying_keys = storages_of(staying).keys()
            on_host = all(storage.device.type == "cpu" for storage in storages.values())
            offloaded = self._offloaded.setdefault(label, [])
            for key, storage in storages.items():
                # Beside a device, counters of steps and the like are on the host by intent.
                moves = on_host or storage.device.type != "cpu"
                if storage.nbytes() == 0 or key in staying_keys or not moves or not storage.resizable():
                    continue
                offloaded.append(_Offloaded(storage, _copy(storage)))
                self.parts.add(label)
                # `resize_` on the storage keeps every tensor, view and parameter that refers to it;
                # assigning `.data` would replace the tensors that FSDP2's flat views and the
                # optimizer hold.
                storage.resize_(0)

    def restore(self, *labels: str) -> None:
        """Restore the tensors under these labels, or all of them without labels, bit for bit."""
        with self._lock:
            for label in labels or tuple(self._offloaded):
                offloaded = self._offloaded.get(label, [])
                while offloaded:
                    storage, host = offloaded[-1]
                    storage.resize_(host.numel())
                    bytes_of(storage).copy_(host)
                    offloaded.pop()  # only now: if memory is short, what did not come back can be asked for again
                self.parts.discard(label)

    def restore_for_good(self) -> None:
        """Restore everything and disable offloading for good; for readers on another thread."""
        with self._lock:
            self._closed = True
            self.restore()


def _copy(storage: torch.UntypedStorage) -> Tensor:
    source = bytes_of(storage)
    pinned = storage.device.type == "cuda"
    # The copy is waited for: the memory is given away right after.
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).copy_(source)
