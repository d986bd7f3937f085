"""Host memory of a sharded model: tensors that are offloaded for a while, and unsharded copies that ranks share.

Offloading frees the storage of a tensor and keeps the tensor object. Parameters, DTensors, the flat views that FSDP2
gathers from, and the keys of an optimizer's state remain the same objects. Reading an offloaded tensor returns garbage
or crashes: call `restore` before every read, and `restore_for_good` where another thread may read.

Shared copies hold unsharded tensors once for all ranks of a machine, so that CPU ranks decode over the same memory. An
all-gather through sockets would leave a full copy on every rank. Here each rank writes its rows into one anonymous
memory file, which has no name in any file system, so that a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.storages import bytes_of, storages_of
from holdfast.parallel.stream import Holding, full_tensor, held_tensors, owners_of, rows_at


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


_NAME = "holdfast-weights"
_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector that kernels load."""
_TOKEN = _ALIGNMENT
"""Random bytes before the tensors, by which a rank knows that it opened rank 0's memory."""


def live_tensors(policy: nn.Module, ranks: RankGroup, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by canonical name; every rank walks through all of them, in step with the others.

    Shards on the CPU are written into memory that the ranks share, if all ranks are on one machine; nobody may write to
    what is yielded. Other shards are gathered one at a time. A tensor that is not sharded is the policy's own.

    Args:
        policy: As it trains.
        ranks: The group of all ranks.
        dtype: The compute dtype. Tensors that would have to be cast to it are gathered one at a time instead.
    """
    holdings = held_tensors(policy)
    shards = _shareable(holdings, dtype)
    common = _written_together(shards, ranks) if shards and ranks.size > 1 else {}
    for name in list(holdings):
        yield name, common.pop(name) if name in common else full_tensor(holdings[name])


def common_bytes(policy: nn.Module, ranks: RankGroup, dtype: torch.dtype) -> int:
    """Return how many bytes of whole tensors exist once for all ranks; all of them call this together."""
    shards = _shareable(held_tensors(policy), dtype)
    if not shards or ranks.size == 1:
        return 0
    _, count = _offsets(shards)
    if shared_bytes(count, ranks) is None:  # nothing is written, so it takes no memory
        return 0
    return sum(shard.numel() * shard.element_size() for shard in shards.values())


def _shareable(holdings: Mapping[str, Holding], dtype: torch.dtype) -> dict[str, DTensor]:
    """Return the CPU tensors that are sharded and computed in the dtype in which they are stored."""
    return {
        name: tensor
        for name, tensor in holdings.items()
        if isinstance(tensor, DTensor)
        and tensor.device_mesh.device_type == "cpu"
        and tensor.dtype == dtype
        and len(owners_of(tensor)) > 1
    }


def _offsets(shards: Mapping[str, DTensor]) -> tuple[dict[str, int], int]:
    """Return where each tensor begins behind the token, and how many bytes all of it takes."""
    offsets, count = {}, _TOKEN
    for name, shard in shards.items():
        offsets[name] = count
        count += -(-shard.numel() * shard.element_size() // _ALIGNMENT) * _ALIGNMENT
    return offsets, count


@torch.no_grad()
def _written_together(shards: Mapping[str, DTensor], ranks: RankGroup) -> dict[str, Tensor]:
    """Return whole tensors in common memory; nothing, on all ranks, where they cannot share any."""
    offsets, count = _offsets(shards)
    memory = shared_bytes(count, ranks)
    if memory is None:
        return {}
    whole_tensors = {}
    for name, shard in shards.items():
        size = shard.numel() * shard.element_size()
        whole_tensors[name] = memory[offsets[name] : offsets[name] + size].view(shard.dtype).view(shard.shape)
        local, owners = shard.to_local().detach(), owners_of(shard)
        if ranks.rank in owners and local.numel():
            whole_tensors[name][rows_at(shard, owners.index(ranks.rank), len(owners))].copy_(local)
    ranks.gather(None)  # nobody reads what another one has not written yet
    return whole_tensors


@dataclass(frozen=True)
class _MemoryOffer:
    """Where rank 0's memory can be opened by processes of the same user on the same machine."""

    path: str
    token: bytes


def shared_bytes(count: int, ranks: RankGroup) -> Tensor | None:
    """Return `count` bytes [count] (uint8) that all ranks read and write; all ranks call this together.

    They are given back when no rank has a view of them any more.

    Returns:
        None on every rank where one of them cannot open the memory: it is on another machine, or runs as another user.
    """
    descriptor, offer = _offered(count) if ranks.rank == 0 else (-1, None)
    offer = ranks.agree(offer)
    try:
        if offer is not None and ranks.rank != 0:
            descriptor = _opened(offer)
        mapped = _mapped(descriptor, count, offer)
        together = all(ranks.gather(mapped is not None))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8) if together and mapped is not None else None


def _offered(count: int) -> tuple[int, _MemoryOffer | None]:
    """Make memory; return its descriptor, and where others can open it."""
    if _counts_every_page():
        return -1, None
    descriptor, token = -1, secrets.token_bytes(_TOKEN)
    try:
        # Not a file in /dev/shm, which a killed process would leave there and which containers limit to 64
        # MB.
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, count)
        os.pwrite(descriptor, token, 0)
    except (AttributeError, OSError):  # not a Linux, one that forbids it, or a limit on the size of files
        if descriptor >= 0:
            os.close(descriptor)
        return -1, None
    return descriptor, _MemoryOffer(f"/proc/{os.getpid()}/fd/{descriptor}", token)


def _counts_every_page() -> bool:
    """Return whether the kernel refuses to overcommit memory.

    A process that writes to a shared page for which no memory is left is then killed by SIGBUS.
    """
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def _opened(offer: _MemoryOffer) -> int:
    """Open rank 0's memory by its path under /proc; -1 where this rank cannot.

    On another machine or in another container the path does not exist, or is another process's file.
    """
    try:
        # /proc names an anonymous file as memfd: and its name; any other link would be a stranger's file.
        if not str(Path(offer.path).readlink()).startswith(f"/memfd:{_NAME}"):
            return -1
        return os.open(offer.path, os.O_RDWR)
    except OSError:
        return -1


def _mapped(descriptor: int, count: int, offer: _MemoryOffer | None) -> mmap.mmap | None:
    """Map the memory that is offered; None where the descriptor is of something else."""
    if descriptor < 0 or offer is None:
        return None
    try:
        if os.fstat(descriptor).st_size != count or os.pread(descriptor, _TOKEN, 0) != offer.token:
            return None
        return mmap.mmap(descriptor, count)
    except OSError:
        return None
