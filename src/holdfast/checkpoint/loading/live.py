"""What a checkpoint is read into: planned by its manifest, made whole of what was read, and only then set.

Nothing here opens a file, so that a plan of a run executes a load with these functions on tensors without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import AVERAGE, model_tensors
from holdfast.checkpoint.loading.companions import (
    Companion,
    companion_state,
    own_tensors,
    plan_companions,
    targets_of,
)
from holdfast.checkpoint.loading.matching import Declared, LoadPlan, Target, plan_averages, refusal
from holdfast.checkpoint.loading.trained import (
    Hyperparameters,
    PlannedLoad,
    optimizer_state,
    plan_trained,
    set_optimizer,
)
from holdfast.optim.state import OptimizerState
from holdfast.parallel.shards import local_part, sharded_parameters


class LiveState(NamedTuple):
    """What a checkpoint is read into."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None
    averages: Mapping[str, Tensor] | None
    companions: Mapping[str, Companion] | None


class LoadPlans(NamedTuple):
    """What a model takes of a checkpoint, and what its companions take, by name."""

    model: PlannedLoad
    companions: Mapping[str, PlannedLoad]

    @property
    def targets(self) -> dict[str, Target]:
        """What is read, under the names of the DCP."""
        return self.model.plan.targets | targets_of(self.companions)


MAIN_OPTIMIZER = ""
"""Key of the state of the model's optimizer; those of companions have the companions' names."""


def plan_load(
    live: LiveState, manifest: Manifest, declared: Declared, hyperparameters: Hyperparameters, full_path: str
) -> LoadPlans:
    """Return what the model takes, and what its companions do; all ranks call this together.

    Raises:
        CheckpointMismatch: Something does not fit.
    """
    main, companions = PlannedLoad(), dict[str, PlannedLoad]()
    plan_trained(main, live.model, live.parameters, live.optimizer, manifest, declared, hyperparameters)
    if live.averages is not None:
        plan_averages(main.plan, live.averages, manifest, declared)
    if live.companions is not None:
        companions = plan_companions(main.plan, live.companions, manifest, declared, hyperparameters)
    if main.plan.refused:
        raise CheckpointMismatch(refusal(full_path, main.plan.refused))
    return LoadPlans(main, companions)


def states_read(
    live: LiveState, plans: LoadPlans, manifest: Manifest, tensors: Mapping[str, Tensor]
) -> dict[str, OptimizerState | None]:
    """Return the state of every optimizer that is read, on the devices of its parameters; nothing live changes.

    Raises:
        CheckpointMismatch: A quantised state's class does not accept its parts.
    """
    states: dict[str, OptimizerState | None] = {}
    if live.optimizer is not None:
        states[MAIN_OPTIMIZER] = optimizer_state(
            tensors, live.optimizer, live.parameters, manifest, plans.model.wrapped
        )
    for name, planned in plans.companions.items():
        states[name] = companion_state(name, (live.companions or {})[name], planned, manifest, tensors)
    return states


def set_live(
    live: LiveState,
    plans: LoadPlans,
    tensors: Mapping[str, Tensor],
    states: Mapping[str, OptimizerState | None],
) -> list[str]:
    """Copy what was read into the model and its companions, and set their optimizers; return what differs, in words."""
    _fill(model_tensors(live.model), live.parameters, live.averages or {}, tensors)
    notes = list(plans.model.plan.deviations)
    if count := plans.model.plan.unsaved:
        notes.append(f"{count} frozen tensors are not in the checkpoint and stay as the model came with them")
    notes += _set_state(live.optimizer, live.parameters, states.get(MAIN_OPTIMIZER), plans.model.plan)
    for name, planned in plans.companions.items():
        companion = (live.companions or {})[name]
        notes += _set_companion(name, companion, planned.plan, own_tensors(tensors, name), states[name])
    return notes


@torch.no_grad()
def _fill(
    live: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    averages: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy what was read; averages that the checkpoint does not have begin at their weights."""
    for key, staged in tensors.items():
        if key in live:
            local_part(live[key]).copy_(local_part(staged))
    for name, average in averages.items():
        local_part(average).copy_(local_part(tensors.get(AVERAGE + name, parameters[name].data)))


def _set_companion(
    name: str, companion: Companion, plan: LoadPlan, tensors: Mapping[str, Tensor], state: OptimizerState | None
) -> list[str]:
    parameters = sharded_parameters(companion.model)
    _fill(model_tensors(companion.model), parameters, {}, tensors)
    return [f"{name}: {note}" for note in _set_state(companion.optimizer, parameters, state, plan)]


def _set_state(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter], state: OptimizerState | None, plan: LoadPlan
) -> list[str]:
    if optimizer is None or state is None:
        return []
    return set_optimizer(optimizer, parameters, state, plan)
