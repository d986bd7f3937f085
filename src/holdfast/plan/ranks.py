"""The other ranks of a plan: all like this one, and none of them there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World, forget_meshes

T = TypeVar("T")


class AlikeRanks(RankGroup):
    """A group in which every other rank does and says what this one does."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = None

    def gather(self, item: T) -> list[T]:
        """Return the item as often as there are ranks."""
        return [item] * self.size

    def swap(self, outgoing: Sequence[T]) -> list[T]:
        """Return what this rank would send itself; in a plan every sequence is its own."""
        return [outgoing[self.rank]] * self.size

    def agree(self, value: T) -> T:
        """Return the value: the first rank's is the same."""
        return value

    def on_first_rank(self, act: Callable[[], T]) -> T:
        """Return what `act` returns."""
        return act()


class _Silent:
    """Stands for the channel by which ranks learn of failures."""

    @contextlib.contextmanager
    def phase(self, _: str) -> Iterator[None]:
        """Enter a phase that nobody hears of."""
        yield


@contextlib.contextmanager
def alone_among(size: int, rank: int, device: torch.device) -> Iterator[World]:
    """Be one of so many ranks within the block; collectives return at once, and change nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        local_size = min(size, 8)
        failure = cast("FailureChannel", _Silent())
        yield World(rank, size, rank % local_size, device, failure, local_size)
    finally:
        dist.destroy_process_group()
        forget_meshes()


def alike(world: World) -> Any:
    """Return the group of a world's ranks."""
    return AlikeRanks(world.rank, world.size)
