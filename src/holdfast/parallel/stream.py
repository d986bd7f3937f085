"""Gather the full tensors of a sharded model one group at a time, for exports and for engines outside the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from holdfast.parallel.collectives import RankGroup
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


def live_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by canonical name, gathered one at a time; a tensor that is not sharded is the policy's own.

    Every rank walks through all of them, in step with the others.
    """
    for name, holding in held_tensors(policy).items():
        yield name, full_tensor(holding)


class StreamStopped(HoldfastError):
    """Another rank has left a stream of tensors; that rank's own error is the cause."""


class _Line:
    """The words between rank 0 and a rank before its shard travels, so that neither waits for one that has failed.

    A rank offers a shard, and rank 0 answers when it has room for it. Each may say instead that it leaves the stream.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.rank, self._group = ranks.rank, ranks.group
        self._open = {0} if self.rank else set(range(1, ranks.size))
        self._offers = set[int]()
        """Ranks whose offer has no answer yet; on rank 0."""

    def send(self, shard: Tensor) -> None:
        """Send a shard to rank 0, when that has room for it."""
        self._offer()
        dist.send(shard, 0)

    def receive(self, other: int, room: Callable[[], Tensor]) -> Tensor:
        """Return the shard that a rank sends; it lies in the tensor that `room` makes."""
        self._hear(other)
        rows = room()
        self._answer(other, goes_on=True)
        dist.recv(rows, other)
        return rows

    def end(self) -> None:
        """End the stream on all ranks, or on none."""
        if self.rank:
            self._offer()
        for other in sorted(self._open - {0}):
            self._hear(other)
            self._answer(other, goes_on=True)
            self._open.discard(other)

    def leave(self) -> None:
        """Tell the other ranks that this one has left the stream with an error."""
        for other in sorted(self._open):
            with suppress(StreamStopped, RuntimeError):  # RuntimeError: the rank is gone
                if self.rank == 0 and other not in self._offers:
                    self._hear(other)
                self._answer(other, goes_on=False)

    def _offer(self) -> None:
        self._tell(0, goes_on=True)
        self._hear(0)

    def _hear(self, other: int) -> None:
        word = torch.empty(1, dtype=torch.uint8)
        dist.recv(word, other, group=self._group)
        if not word.item():
            self._open.discard(other)
            raise StreamStopped("Another rank has stopped sending or receiving tensors; its own error says why.")
        self._offers.add(other)

    def _answer(self, other: int, *, goes_on: bool) -> None:
        self._offers.discard(other)
        self._tell(other, goes_on=goes_on)

    def _tell(self, other: int, *, goes_on: bool) -> None:
        dist.send(torch.tensor([goes_on], dtype=torch.uint8), other, group=self._group)


@torch.no_grad()
def _whole_on_first(tensor: Holding, line: _Line) -> Tensor | None:
    """Return the whole tensor on rank 0 and None elsewhere; every rank calls this for the same tensors in order.

    Shards travel straight into their rows, so rank 0 holds one tensor and the others nothing but their shards.
    """
    if isinstance(tensor, MergedWeight):
        gathered = [_whole_on_first(component, line) for component in tensor.parts]
        parts = [part for part in gathered if part is not None]
        return tensor.join.run(parts) if parts else None
    if not isinstance(tensor, DTensor):
        return None if line.rank else tensor.detach()
    local, owners = tensor.to_local().detach(), owners_of(tensor)
    if line.rank:
        if line.rank in owners and local.numel():
            line.send(local.contiguous())
        return None
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    for index, owner in enumerate(owners):
        rows = full[rows_at(tensor, index, len(owners))]
        if owner == 0:
            rows.copy_(local)
        elif rows.numel():
            line.receive(owner, partial(_same, rows))
    return full


def _same(rows: Tensor) -> Tensor:
    return rows


@torch.no_grad()
def _pieces_on_first(tensor: Holding, line: _Line) -> Iterator[Tensor]:
    """Yield a tensor's rows on rank 0, shard by shard as they lie, and nothing elsewhere.

    Every rank walks through this for the same tensors in order; a shard travels when it is asked for.
    """
    if not isinstance(tensor, DTensor):
        full = _whole_on_first(tensor, line)
        if full is not None:
            yield full
        return
    local, owners = tensor.to_local().detach(), owners_of(tensor)
    if line.rank in owners and line.rank != 0 and local.numel():
        line.send(local.contiguous())
    for index, owner in enumerate(() if line.rank else owners):
        rows = rows_at(tensor, index, len(owners))
        count = rows.stop - rows.start
        if count == 0:
            return
        if owner == 0:
            yield local
        else:
            room = partial(torch.empty, (count, *tensor.shape[1:]), dtype=local.dtype, device=local.device)
            yield line.receive(owner, room)


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


@contextmanager
def converted_tensors(
    read: Callable[[str], Holding], conversions: Sequence[Conversion], dtype: torch.dtype | None, ranks: RankGroup
) -> Iterator[Iterator[tuple[str, Pieces]]]:
    """Give the block full tensors under the names that files of the model have, gathered one group at a time.

    Every rank opens the block. Tensors that the block leaves are walked through at its end; an error of the block or of
    the gathering ends the stream on all ranks, the others with `StreamStopped`.

    Args:
        read: Returns a tensor, or this rank's shard of it, by canonical name; called once for each.
        conversions: From `plan_outgoing`, on their headers.
        dtype: Cast floating-point tensors to this.
        ranks: All ranks. Rank 0 receives the tensors; the others send their shards and are given nothing.

    The pieces of a tensor are used before the next tensor is asked for; unused pieces are dropped.

    Raises:
        StreamStopped: Another rank has an error.
    """
    line = _Line(ranks)
    try:
        tensors = _converted(read, conversions, dtype, line)
        yield tensors
        deque(tensors, maxlen=0)
        line.end()
    except Exception:
        line.leave()
        raise


def _converted(
    read: Callable[[str], Holding], conversions: Sequence[Conversion], dtype: torch.dtype | None, line: _Line
) -> Iterator[tuple[str, Pieces]]:
    for conversion in conversions:
        if conversion.renames_only:
            pieces = (_cast(piece, dtype) for piece in _pieces_on_first(read(conversion.sources[0]), line))
            if line.rank == 0:
                yield next(iter(conversion.targets)), pieces
            # Every rank must run through all sends and receives, also if the consumer stopped early, or
            # the next tensor's messages would be taken for this one's.
            for _ in pieces:
                pass
            continue
        gathered = _gathered(read, conversion.sources, dtype, line)
        if line.rank == 0:
            # No name may hold a tensor that was handed out while the next one is gathered.
            yield from _handed_out(conversion.run(gathered))
        del gathered


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _gathered(
    read: Callable[[str], Holding], names: Sequence[str], dtype: torch.dtype | None, line: _Line
) -> dict[str, Tensor]:
    """Return whole tensors, cast if asked to, on rank 0; nothing elsewhere."""
    whole_tensors = {}
    for name in names:
        tensor = _whole_on_first(read(name), line)
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
