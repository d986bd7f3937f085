"""Collectives besides FSDP's: exchange Python objects, add metrics, and raise the same error on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from holdfast.errors import HoldfastError, UserError
from holdfast.files import NotRegular

T = TypeVar("T")
N = TypeVar("N", np.int64, np.float32)


class RankGroup:
    """Exchange Python objects between ranks over a separate gloo group.

    Collectives of one group are matched by their order, so that two threads must not share a group: a background save
    and the training loop each have one.

    Args:
        timeout_minutes: Longest wait inside one collective; default: torch's half an hour.
    """

    def __init__(self, timeout_minutes: float | None = None) -> None:
        timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for libraries that run collectives of their own; None for a single process."""
        return self._group

    def close(self) -> None:
        """Destroy the group with its threads and sockets; the object cannot be used afterwards."""
        if self._group is not None:
            # Cleared first, so that a second `close` does nothing.
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, by rank."""
        if self._group is None:
            return [item]
        items: list[T] = [item] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def gather_to_first(self, item: T) -> list[T]:
        """Return every rank's item, by rank, on rank 0, and nothing on the others; all ranks call this together."""
        if self._group is None:
            return [item]
        items: list[T] | None = [item] * self.size if self.rank == 0 else None
        dist.gather_object(item, items, group=self._group)
        return items or []

    def summed(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum over ranks of each number."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the largest over ranks of each number."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: NDArray[N], operation: dist.ReduceOp.RedOpType) -> NDArray[N]:
        if self._group is None:  # without a tensor: a plan's would hold no numbers
            return values
        reduced = torch.from_numpy(values.copy())
        dist.all_reduce(reduced, operation, group=self._group)
        result: NDArray[N] = reduced.numpy()
        return result

    def swap(self, outgoing: Sequence[T]) -> list[T]:
        """Send outgoing[r] to rank r and return what every rank sent here, by rank."""
        if self._group is None:
            return list(outgoing)
        # What travels was pickled by this program's other ranks and by nobody else.
        buffers = [bytearray(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)) for item in outgoing]
        # Torch's object collectives pad every rank's object to the largest and send it to all; this sends
        # each byte once.
        sizes = torch.tensor([len(buffer) for buffer in buffers], dtype=torch.int64)
        incoming_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(incoming_sizes, sizes, group=self._group)
        sent = torch.frombuffer(bytearray().join(buffers), dtype=torch.uint8)
        received = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, incoming_sizes.tolist(), sizes.tolist(), group=self._group)
        data = received.numpy().tobytes()
        items: list[T] = []
        start = 0
        for size in incoming_sizes.tolist():
            items.append(pickle.loads(data[start : start + size]))  # noqa: S301 - see above
            start += size
        return items

    def agree(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank the `HoldfastError` that any rank raised in the block; of several, the lowest rank's.

        Any other exception propagates on its rank alone and is reported as that rank's failure.
        """
        error: HoldfastError | None = None
        try:
            yield
        except HoldfastError as caught:
            error = caught
        except NotRegular as caught:  # a pipe in the place of a file is for its user to take away
            error = UserError(f"{caught}. Put the file back, or remove what stands in its place.")
        first = next((rank_error for rank_error in self.gather(error) if rank_error is not None), None)
        if first is not None:
            raise first

    def on_all_ranks(self, act: Callable[[], T]) -> T:
        """Return what `act` returns on this rank; if it fails on any rank, raise on all, as in `together`."""
        result: list[T] = []
        with self.together():
            result.append(act())
        return result[0]

    def on_first_rank(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0 and return its result on every rank; if it fails, raise on all, as in `together`."""
        result: list[T] = []
        with self.together():
            if self.rank == 0:
                result.append(act())
        return self.agree(result[0] if result else cast("T", None))

    def first_rank_first(self, act: Callable[[], T]) -> T:
        """Run on rank 0 before the others, so that downloads and caches are made once."""
        result: list[T] = []
        for turn in (True, False):
            with self.together():
                if (self.rank == 0) is turn:
                    result.append(act())
        return result[0]


def reduce_sums(sums: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Add [2] tensors (total, denominator) over all ranks in one collective.

    Args:
        sums: The same names on every rank.
        device: Where they are.
    """
    if not sums:
        return {}
    # float64, since a float32 sum of token counts stops growing by one at 2^24.
    stacked = torch.stack([value.to(device=device, dtype=torch.float64) for value in sums.values()])
    dist.all_reduce(stacked)
    return dict(zip(sums, stacked, strict=True))


def add_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, in float64."""
    total = values.to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total
