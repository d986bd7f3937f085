"""Gather the full tensors of a sharded model one group at a time, for exports and for engines outside the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from holdfast.errors import HoldfastError
from holdfast.files import NotRegular
from holdfast.models.adapters.live import Join, adapters_of, joins_of
from holdfast.models.files.conversion import Conversion, Header
from holdfast.models.names import canonical_name
from holdfast.parallel.shards import sharded_parameters


@dataclass(frozen=True)
class MergedWeight:
    """A weight that is computed from several parameters: a matrix plus its LoRA product, or one unpacked from 4 bits.

    Engines and exports see it in place of those parameters; it is computed once they are gathered.
    """

    parts: tuple[Tensor, ...]
    join: Join

    @property
    def shape(self) -> torch.Size:
        """Shape of the computed matrix."""
        return self.parts[0].shape if self.join.header is None else torch.Size(self.join.header.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computed matrix."""
        return self.parts[0].dtype if self.join.header is None else self.join.header.dtype

    def is_floating_point(self) -> bool:
        """Return True: only floating-point matrices are merged."""
        return True


Holding = Tensor | MergedWeight


def held_tensors(policy: nn.Module, *, merge: bool = True) -> dict[str, Holding]:
    """Return the shards of all tensors that an exported model directory holds, by canonical name.

    These are parameters (tied ones under one name) and persistent buffers. LoRA factors are not among them: they are
    merged into the matrices that they adapt, unless `merge` is false; then the frozen base is returned.
    """
    parameters = sharded_parameters(policy)
    holdings: dict[str, Holding] = dict(parameters)
    for adapter in adapters_of(policy).values():
        for factor_name in adapter.names:
            holdings.pop(factor_name, None)
    for name, join in joins_of(policy, merge=merge).items():
        for part_name in join.inputs:
            holdings.pop(part_name, None)
        holdings[name] = MergedWeight(tuple(parameters[part_name] for part_name in join.inputs), join)
    stored = {canonical_name(name) for name in policy.state_dict()}
    for name, buffer in policy.named_buffers():
        if canonical_name(name) in stored:
            holdings[canonical_name(name)] = buffer
    return holdings


def headers_of(holdings: Mapping[str, Holding], dtype: torch.dtype | None) -> dict[str, Header]:
    """Return the shapes of holdings, with floating-point dtypes replaced by `dtype` if given."""
    return {
        name: Header(tuple(tensor.shape), dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in holdings.items()
    }


@torch.no_grad()
def full_tensor(tensor: Holding) -> Tensor:
    """Gather a tensor; every rank calls this for the same tensors in the same order."""
    if isinstance(tensor, MergedWeight):
        return tensor.join.run([full_tensor(component) for component in tensor.parts])
    # `full_tensor` is a collective over the whole mesh: a rank that skips one tensor makes all others wait
    # forever.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def whole_on_first(tensor: Holding) -> Tensor | None:
    """Return the whole tensor on rank 0 and None elsewhere; every rank calls this for the same tensors in order.

    Shards travel straight into their rows, so rank 0 holds one tensor and the others nothing but their shards.
    """
    if isinstance(tensor, MergedWeight):
        gathered = [component for component in map(whole_on_first, tensor.parts) if component is not None]
        return tensor.join.run(gathered) if gathered else None
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not isinstance(tensor, DTensor):
        return tensor.detach() if rank == 0 else None
    local, owners = tensor.to_local().detach(), owners_of(tensor)
    if rank == 0:
        return _received(tensor, local, owners)
    if rank in owners and local.numel():
        dist.send(local.contiguous(), 0)
    return None


@torch.no_grad()
def pieces_on_first(tensor: Holding) -> Iterator[Tensor]:
    """Yield a tensor's rows on rank 0, shard by shard as they lie, and nothing elsewhere.

    Every rank walks through this for the same tensors in order; a shard travels when it is asked for.
    """
    if not isinstance(tensor, DTensor):
        full = whole_on_first(tensor)
        if full is not None:
            yield full
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    local, owners = tensor.to_local().detach(), owners_of(tensor)
    if rank in owners and rank != 0 and local.numel():
        dist.send(local.contiguous(), 0)
    for index, owner in enumerate(owners if rank == 0 else ()):
        rows = rows_at(tensor, index, len(owners))
        count = rows.stop - rows.start
        if count == 0:
            return
        if owner == 0:
            yield local
        else:
            received = torch.empty(count, *tensor.shape[1:], dtype=local.dtype, device=local.device)
            dist.recv(received, owner)
            yield received


def _received(tensor: DTensor, local: Tensor, owners: Sequence[int]) -> Tensor:
    """Return the whole tensor from rank 0's shard and those that the others send."""
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    for index, owner in enumerate(owners):
        rows = full[rows_at(tensor, index, len(owners))]
        if owner == 0:
            rows.copy_(local)
        elif rows.numel():
            dist.recv(rows, owner)
    return full


def owners_of(tensor: DTensor) -> list[int]:
    """Return the ranks whose shards make up a tensor, in the order of its rows; of replicas, only the first."""
    ranks = tensor.device_mesh.mesh
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "units are sharded by rows"
        else:
            ranks = ranks.select(axis, 0)
    return [int(rank) for rank in ranks.flatten()]


def rows_at(tensor: DTensor, index: int, count: int) -> slice:
    """Return the rows of shard `index` of `count`; as in torch, all shards but the last have the same length."""
    most, total = -(-tensor.shape[0] // count), tensor.shape[0]
    return slice(min(index * most, total), min((index + 1) * most, total))


Streamed = TypeVar("Streamed")
Pieces = Iterator[Tensor]
"""Consecutive rows of one tensor, in order, as they are received; a 0-d tensor is a single piece."""


def converted_tensors(
    holdings: Mapping[str, Holding], conversions: Sequence[Conversion], dtype: torch.dtype | None, *, keep: bool
) -> Iterator[tuple[str, Pieces]]:
    """Yield full tensors under the names that files of the model have, gathering one group at a time.

    The consumer must use the pieces of a tensor before it asks for the next one; unused pieces are dropped.

    Args:
        holdings: From `held_tensors`.
        conversions: From `plan_outgoing`, on their headers.
        dtype: Cast floating-point tensors to this.
        keep: Whether this is rank 0, which receives the tensors; other ranks send their shards and yield nothing.
    """
    for conversion in conversions:
        if conversion.renames_only:
            pieces = (_cast(piece, dtype) for piece in pieces_on_first(holdings[conversion.sources[0]]))
            if keep:
                yield next(iter(conversion.targets)), pieces
            # Every rank must run through all sends and receives, also if the consumer stopped early, or
            # the next tensor's messages would be taken for this one's.
            for _ in pieces:
                pass
            continue
        gathered = _gathered(holdings, conversion.sources, dtype)
        if keep:
            # No name may hold a tensor that was handed out while the next one is gathered.
            yield from _handed_out(conversion.run(gathered))
        del gathered


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _gathered(holdings: Mapping[str, Holding], names: Sequence[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return whole tensors, cast if asked to, on rank 0; nothing elsewhere."""
    whole_tensors = {}
    for name in names:
        tensor = whole_on_first(holdings[name])
        if tensor is not None:
            whole_tensors[name] = _cast(tensor, dtype)
    return whole_tensors


def _handed_out(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Pieces]]:
    while tensors:
        name = next(iter(tensors))
        yield name, iter([tensors.pop(name)])


@contextmanager
def drained(tensors: Iterator[tuple[str, Streamed]]) -> Iterator[Iterator[tuple[str, Streamed]]]:
    """Walk through the rest of a stream at the end of the block: the other ranks gather with this one, and would wait.

    After an error that `RankGroup.together` passes on to them, too; any other is this rank's alone and leaves at once.
    """
    try:
        yield tensors
    except (HoldfastError, NotRegular):
        with suppress(Exception):  # such as for want of memory: the error of the block counts
            deque(tensors, maxlen=0)
        raise
    deque(tensors, maxlen=0)
