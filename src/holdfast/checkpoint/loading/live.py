"""The live side of a load: plan it by the manifest, build optimizer states from the tensors read, then set everything.

No function here opens a file, so that `holdfast plan` can execute a load with tensors that hold no numbers.
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
    """The model, optimizer, averages and companions into which a checkpoint is loaded."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None
    averages: Mapping[str, Tensor] | None
    companions: Mapping[str, Companion] | None


class LoadPlans(NamedTuple):
    """The load plans of a model and of its companions by name."""

    model: PlannedLoad
    companions: Mapping[str, PlannedLoad]

    @property
    def targets(self) -> dict[str, Target]:
        """All tensors to read, under their stored names."""
        return self.model.plan.targets | targets_of(self.companions)


MAIN_OPTIMIZER = ""
"""Key of the main optimizer's state in a mapping whose other keys are names of companions."""


def plan_load(
    live: LiveState, manifest: Manifest, declared: Declared, hyperparameters: Hyperparameters, full_path: str
) -> LoadPlans:
    """Plan the loads of the model and its companions; all ranks call this together.

    Raises:
        CheckpointMismatch: The checkpoint differs from the live state in a way that was not declared.
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
    """Build the state of every optimizer that is loaded, on the devices of its parameters; nothing live changes.

    Raises:
        CheckpointMismatch: A class of quantised state does not accept its inner tensors.
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
    """Copy tensors into the model and its companions, and set their optimizers; return notes about differences."""
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
    """Copy tensors into the live ones; averages that the checkpoint lacks are set to their weights."""
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
