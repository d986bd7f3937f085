"""Plan the load of a model and its optimizer, build the optimizer's state from the tensors read, and set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import OPTIM, like
from holdfast.checkpoint.loading.matching import (
    Declared,
    LoadPlan,
    plan_model,
    plan_optimizer,
    saved_groups,
)
from holdfast.checkpoint.loading.wrapped_state import WrappedPlan, made_again, plan_wrapped
from holdfast.optim.state import OptimizerState, names_of, restore, state_device
from holdfast.parallel.shards import local_part

Hyperparameters = Literal["live", "checkpoint"]
"""Whether an optimizer continues with this run's betas, epsilon and the like, or with the checkpoint's."""


@dataclass
class PlannedLoad:
    """Load plan of a model and its optimizer, quantised state included."""

    plan: LoadPlan = field(default_factory=LoadPlan)
    wrapped: WrappedPlan = field(default_factory=WrappedPlan)


def plan_trained(  # noqa: PLR0913 - two things that are read, and how they may differ
    planned: PlannedLoad,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    manifest: Manifest,
    declared: Declared,
    hyperparameters: Hyperparameters,
) -> None:
    """Plan the load of a model and its optimizer, and note deviations; all ranks call this together."""
    plan_model(planned.plan, model, parameters, manifest, declared)
    if optimizer is not None:
        taken = hyperparameters == "checkpoint"
        plan_optimizer(planned.plan, optimizer, parameters, manifest, declared, hyperparameters=taken)
        planned.wrapped = plan_wrapped(planned.plan, optimizer, parameters, manifest, declared)


def optimizer_state(
    read: Mapping[str, Tensor],
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    manifest: Manifest,
    wrapped: WrappedPlan,
) -> OptimizerState:
    """Build an optimizer's state from the tensors read, on the devices of its parameters; nothing live changes.

    Raises:
        CheckpointMismatch: A class of quantised state does not accept its inner tensors.
    """
    assert manifest.optimizer is not None
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, staged in read.items():
        if key.startswith(OPTIM):
            name, _, slot = key.removeprefix(OPTIM).rpartition(".")
            local = local_part(staged)
            counter = local.ndim == 0  # where it belongs is the optimizer's business
            tensors.setdefault(name, {})[slot] = (
                local if counter else like(staged, local.to(state_device(optimizer, parameters[name])))
            )
    names = names_of(optimizer, parameters)
    updated_names = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    values = {name: keys for name, keys in manifest.optimizer["values"].items() if name in updated_names}
    saved = OptimizerState(manifest.optimizer["kind"], saved_groups(manifest), tensors, values)
    return made_again(saved, wrapped, parameters)


def set_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], state: OptimizerState, plan: LoadPlan
) -> list[str]:
    """Set an optimizer's state, and the hyper-parameters that the plan takes; return notes about those that differ."""
    restore(optimizer, parameters, state)
    for group, taken in zip(optimizer.param_groups, plan.hyperparameters or (), strict=False):
        group.update(taken)
    whose = "this run's value" if plan.hyperparameters is None else "the checkpoint's value"
    return [f"optimizer: {change}; {whose} is used" for change in plan.changes]
