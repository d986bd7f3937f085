"""Whether a rank has room for the whole weights, which it decodes over and training has in shards."""

from __future__ import annotations

import psutil
import torch

from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.training.run import Evaluation

_GIB = 2**30


def check_copy_fits(measured: Evaluation, budget_gib: float | None) -> None:
    """Refuse rollouts that would run out of memory in step 1.

    Args:
        measured: The policy, on its device already.
        budget_gib: Most that the copy may take; None for what is free now.

    Raises:
        ConfigError: A copy takes more.
    """
    needed = copy_bytes(measured)
    budget = free_bytes(measured.world) if budget_gib is None else int(budget_gib * _GIB)
    if needed > budget:
        dtype = measured.plan.compute_dtype
        limit = f"has {budget / _GIB:.3g} GiB free" if budget_gib is None else f"may take {budget_gib:g} GiB for it"
        advice = "" if dtype == "bfloat16" else " set parallel.compute_dtype: bfloat16,"
        raise ConfigError(
            f"rollout: every rank samples over a whole copy of the weights, which takes {needed / _GIB:.3g} GiB in "
            f"{dtype}, and rank {measured.world.rank} {limit} (rollout.copy_gib). Use a smaller model,{advice} or "
            "start fewer ranks on a machine."
        )


def copy_bytes(measured: Evaluation) -> int:
    """Return what a rank's copy takes besides the policy itself; 0 where sampling reads the policy's own tensors."""
    plan, config = measured.plan, measured.config
    if not plan.sharded and config.model.dtype == plan.compute_dtype and config.model.lora is None:
        return 0
    size = getattr(torch, plan.compute_dtype).itemsize
    return int(sum(parameter.numel() for parameter in measured.origin.skeleton.parameters()) * size)


def free_bytes(world: World) -> int:
    """Return the memory that is free on this rank's device; of a host's, its share among the ranks there."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return int(torch.cuda.mem_get_info(world.device)[0]) + cached
    return int(psutil.virtual_memory().available) // (world.local_size or 1)
