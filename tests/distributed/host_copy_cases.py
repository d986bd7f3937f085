"""What rank pools run: one copy of the weights for all ranks."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.host_memory import common_bytes, live_tensors, shared_bytes
from holdfast.parallel.mesh import World
from holdfast.parallel.stream import full_tensor, held_tensors
from holdfast.training.setup.begin import Live, build_run
from tests.memory import mapped_weights

Told = dict[str, Any]


def whole(world: World, tree: dict[str, Any], rows: Any, *, blind: int | None = None) -> Told:
    """Return the whole tensors of a model, as gathered and as shared, and what memory held them.

    Args:
        world: This process's place.
        tree: Of a run.
        rows: Its data.
        blind: A rank that can open no more files, so that it cannot look at rank 0's memory.
    """
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    gathered = {name: full_tensor(tensor).clone() for name, tensor in held_tensors(training.model.module).items()}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if world.rank == blind:
        lowest_free = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        shared = dict(live_tensors(training.model.module, training.run.ranks, torch.float64))
        common = common_bytes(training.model.module, training.run.ranks, torch.float64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    told: Told = {
        "gathered": gathered,
        "shared": {name: tensor.clone() for name, tensor in shared.items()},
        "mapped": mapped_weights(),
        "common": common,
        "cast": mapped_of(training, torch.float32),
        "own": len(
            {tensor.data_ptr() for tensor in shared.values()} & {part.data_ptr() for part in local_parts(training)}
        ),
    }
    del shared
    return told | {"left": mapped_weights()}


def local_parts(run: Any) -> list[torch.Tensor]:
    """Return what a rank holds of a model."""
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in held_tensors(run.trained.model).values()
    ]


def mapped_of(run: Any, dtype: torch.dtype) -> int:
    """Return the bytes that ranks share more of while weights are used in a dtype."""
    before = mapped_weights()
    found = dict(live_tensors(run.trained.model, run.setting.ranks, dtype))
    assert found
    return mapped_weights() - before


def seen_by_others(world: World) -> list[int]:
    """Return what a rank reads in memory into which every rank wrote its number."""
    from holdfast.parallel.collectives import RankGroup

    memory = shared_bytes(world.size + 64, RankGroup())
    assert memory is not None
    memory[64 + world.rank] = world.rank + 1
    dist.barrier()
    return [int(number) for number in memory[64:]]


def foreign(world: World) -> list[bool]:
    """Return whether ranks share memory that one of them takes to be longer, and then that of one length."""
    from holdfast.parallel.collectives import RankGroup

    ranks = RankGroup()
    return [shared_bytes(4096 + (world.rank == 1), ranks) is not None, shared_bytes(4096, ranks) is not None]


def with_small_files(world: World, count: int) -> list[bool]:
    """Return whether ranks share memory that is longer than a file of rank 0 may be, and then as long."""
    from holdfast.parallel.collectives import RankGroup

    ranks, limits = RankGroup(), resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        return [shared_bytes(size, ranks) is not None for size in (count + 1, count)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
