"""Loads of experts over a whole update: what the router loss `global` needs before, and metrics tell after it."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.data.packing import to_device
from holdfast.errors import ConfigError
from holdfast.models.routers import global_loads
from holdfast.parallel.collectives import add_over_ranks
from holdfast.training.run import Run
from holdfast.types import MiniBatch


def loads_before(run: Run, mini_batch: MiniBatch) -> Tensor | None:
    """Return [E] what the router loss of an update needs to know of all its sequences; None where it needs nothing.

    For `global` that is one more forward pass of every micro-batch; all ranks call this together.

    Raises:
        ConfigError: The router loss `batch` meets an update of several micro-batches, which was not accepted.
    """
    loss, section = run.policy.router_loss, run.config.model.router_loss
    if loss is None:
        return None
    several = len(mini_batch.micro_batches)
    if section.kind == "batch" and not section.allow_split and several > 1:
        raise ConfigError(
            f"model.router_loss: batch balances what one forward pass sees, and the update of step "
            f"{run.state.step + 1} takes {several} micro-batches, since rows gave more sequences than one each. Raise "
            "data.tokens_per_micro_batch, use router_loss: sequence or global, or accept that the result depends on "
            "the split: router_loss: {kind: batch, allow_split: true}."
        )
    if loss.kind != "global":
        return None
    with run.phase("router_loads"):
        parts = []
        for micro_batch in mini_batch.micro_batches:
            tally = run.policy.router_tally(to_device(micro_batch, run.world.device))
            parts.append(torch.cat([tally.choices.sum(0), tally.rows.sum()[None]]).double())
        total = add_over_ranks(torch.stack(parts).sum(0))
    return global_loads(total[:-1], total[-1], mini_batch.count)


def load_metrics(loads: Tensor | None) -> dict[str, float]:
    """Return the largest and the smallest load of an expert in any layer, over all ranks; 1 is its even share.

    Args:
        loads: [layers, E] how many tokens this rank sent to each expert; None without experts.
    """
    if loads is None:
        return {}
    total = add_over_ranks(loads)
    relative = total * total.shape[1] / total.sum(1, keepdim=True).clamp(min=1.0)
    largest, smallest, idle = torch.stack([relative.max(), relative.min(), (total == 0).sum()]).tolist()
    return {"router/load_max": largest, "router/load_min": smallest, "router/idle_experts": idle}
