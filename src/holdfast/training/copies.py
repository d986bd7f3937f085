"""Whether a rank has room for the whole weights, which it decodes over and training has in shards."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.parallel.host_copy import common_bytes
from holdfast.parallel.mesh import World
from holdfast.training.run import ShardedModel

_GIB = 2**30


def shared_by_ranks(sharded: ShardedModel) -> int:
    """Return how many bytes of weights all ranks sample over together; all of them call this together."""
    return common_bytes(sharded.model, sharded.setting.ranks, getattr(torch, sharded.plan.compute_dtype))


def check_copy_fits(sharded: ShardedModel, budget_gib: float | None, common: int, *, in_process: bool) -> None:
    """Refuse rollouts that would run out of memory in step 1; else say what they take.

    Args:
        sharded: The policy, on its device already.
        budget_gib: Most that sampling may take; None for what is free now.
        common: From `shared_by_ranks`.
        in_process: Whether our own decoding samples, and not transformers' `generate`.

    Raises:
        ConfigError: Sampling takes more.
    """
    dtype = sharded.plan.compute_dtype
    copied = copy_bytes(sharded, common)
    laid_out = layout_bytes(sharded) if in_process else 0
    needed = copied + laid_out
    world, parts = sharded.setting.world, _parts(copied, -(-common // sharded.setting.ranks.size), laid_out, dtype)
    budget = free_bytes(world) if budget_gib is None else int(budget_gib * _GIB)
    if needed > budget:
        limit = f"may take {budget_gib:g} GiB (rollout.copy_gib)"
        if budget_gib is None:
            limit = f"has {size_words(budget)} free"
        advice = "" if dtype == "bfloat16" else ", set parallel.compute_dtype: bfloat16"
        room = "devices with more memory" if world.device.type == "cuda" else "fewer ranks on a machine"
        raise ConfigError(
            f"rollout: sampling takes {size_words(needed)} on every rank, {parts}, and rank "
            f"{world.rank} {limit}. Use a smaller model{advice}, or use {room}."
        )
    if world.is_first:
        print(f"rollouts: {parts}, on every rank", flush=True)


def copy_bytes(sharded: ShardedModel, common: int) -> int:
    """Return what a rank's copy takes besides the policy itself, of which sampling reads what has the right dtype.

    Of the `common` bytes that all ranks share, a rank has its part.
    """
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    plan = sharded.plan
    whole = not plan.sharded or (plan.shard == 1 and not plan.cpu_offload)
    if whole and sharded.setting.config.model.lora is None:
        numbers = sum(value.numel() for value in sharded.model.parameters() if value.dtype != dtype)
    else:
        numbers = sum(value.numel() for value in sharded.origin.skeleton.parameters())
    return int(numbers) * dtype.itemsize - common + -(-common // sharded.setting.ranks.size)


def layout_bytes(sharded: ShardedModel) -> int:
    """Return what decoding takes on the CPU for matrices that it lays out anew while the first ones stay."""
    if sharded.setting.world.device.type != "cpu":
        return 0
    layers = [layer for layer in sharded.origin.skeleton.modules() if type(layer) is nn.Linear]
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    return sum(int(layer.weight.numel()) for layer in layers) * dtype.itemsize


def free_bytes(world: World) -> int:
    """Return the memory that is free on this rank's device; of a host's, its share among the ranks there."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return int(torch.cuda.mem_get_info(world.device)[0]) + cached
    return free_host_bytes(world)


def free_host_bytes(world: World) -> int:
    """Return this rank's share of the memory that is free on its machine."""
    return int(psutil.virtual_memory().available) // (world.local_size or 1)


def _parts(copied: int, shared: int, laid_out: int, dtype: str) -> str:
    """Say what sampling takes; `shared` of what is copied is this rank's part of what all ranks read."""
    whose = {
        "a part of the copy of the weights that all ranks share": shared,
        f"a copy of the {'other ' if shared else ''}weights": copied - shared,
    }
    parts = [f"{name}, {size_words(count)} in {dtype}" for name, count in whose.items() if count]
    laid = [f"{size_words(laid_out)} of matrices laid out for decoding"] if laid_out else []
    return ", and ".join([*(parts or ["the policy's own weights"]), *laid])
