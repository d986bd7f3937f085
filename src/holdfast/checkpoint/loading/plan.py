"""A load as a value: the plan says which tensors are read for which live state, and is then executed.

No function here opens a file, so that `holdfast plan` can execute a load with tensors that hold no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import AVERAGE, OPTIM, OWN_CONTENTS, like, model_tensors
from holdfast.checkpoint.loading.matching import (
    Declared,
    Match,
    Target,
    allowed,
    match_averages,
    match_model,
    match_optimizer,
    merged,
    optimizer_misfit,
    refusal,
    saved_groups,
)
from holdfast.checkpoint.loading.parts import Part
from holdfast.checkpoint.loading.wrapped_state import WrappedPlan, made_again, plan_wrapped
from holdfast.optim.state import (
    OptimizerState,
    groups_of,
    hyperparameter_changes,
    matched_hyperparameters,
    names_of,
    restore,
    state_device,
)
from holdfast.parallel.shards import local_part

Hyperparameters = Literal["live", "checkpoint"]
"""Whether an optimizer continues with this run's betas, epsilon and the like, or with the checkpoint's."""


@dataclass(frozen=True)
class PartPlan:
    """The load of one part."""

    part: Part
    manifest: Manifest
    """Of this part alone."""
    match: Match
    wrapped: WrappedPlan = field(default_factory=WrappedPlan)
    """Quantised state of its optimizer."""
    hyperparameters: Sequence[Mapping[str, Any]] | None = None
    """Values that each param group takes from the checkpoint; None: none."""
    changes: Sequence[str] = ()
    """Sentences about hyper-parameters that differ."""


@dataclass(frozen=True)
class LoadPlan:
    """The load of a checkpoint into all parts of a run."""

    parts: tuple[PartPlan, ...]
    """The trained model's first."""
    deviations: tuple[str, ...]
    """Sentences about deviations that were declared."""

    @property
    def targets(self) -> dict[str, Target]:
        """All tensors to read, under their stored names."""
        return {
            planned.part.prefix + key: target for planned in self.parts for key, target in planned.match.targets.items()
        }


def plan_load(
    parts: Sequence[Part],
    manifest: Manifest,
    declared: Declared,
    hyperparameters: Hyperparameters,
    full_path: str,
    *,
    companions: bool = True,
) -> LoadPlan:
    """Return the plan of a load; all ranks call this together.

    Args:
        parts: The live state, the trained model first.
        manifest: Manifest of the checkpoint.
        declared: Allowed deviations; patterns match names without a companion's prefix.
        hyperparameters: As in `reader.load_state`.
        full_path: The checkpoint, for the message.
        companions: Whether the checkpoint's companions are loaded, and those that the run lacks are a deviation.

    Raises:
        CheckpointMismatch: The checkpoint differs from the live state in a way that was not declared.
    """
    main, *others = parts
    plans = [plan_part(main, manifest, declared, hyperparameters)]
    matches = [plans[0].match]
    by_name = {part.name: part for part in others}
    for name in sorted({*by_name, *manifest.contents} - OWN_CONTENTS) if companions else ():
        part = by_name.get(name)
        if part is None:
            difference = f"the checkpoint has a {name}, and this run has none"
            matches.append(allowed(declared.drop, name, difference, "resume.drop"))
        elif not part.own(manifest.tensors):
            difference = f"the checkpoint has no {name}, and this run has one"
            matches.append(allowed(declared.add, name, difference, "resume.add"))
        else:
            plans.append(plan_part(part, part.manifest_in(manifest), declared, hyperparameters))
            theirs = plans[-1].match
            matches.append(
                Match(
                    deviations=tuple(f"{name}: {line}" for line in theirs.deviations),
                    refused=tuple(f"{name}: {line}" for line in theirs.refused),
                )
            )
    everything = merged(matches)
    if everything.refused:
        raise CheckpointMismatch(refusal(full_path, everything.refused))
    return LoadPlan(tuple(plans), everything.deviations)


def plan_part(part: Part, manifest: Manifest, declared: Declared, hyperparameters: Hyperparameters) -> PartPlan:
    """Return the plan of one part, with what is refused in it; all ranks call this together."""
    matches = [*match_model(part.model, part.parameters, manifest, declared)]
    wrapped, taken, changes = WrappedPlan(), None, list[str]()
    if part.optimizer is not None:
        misfit = optimizer_misfit(part.optimizer, manifest)
        if misfit is not None:
            matches.append(Match(refused=(misfit,)))
        else:
            matches += match_optimizer(part.optimizer, part.parameters, manifest, declared)
            live, saved = groups_of(part.optimizer, names_of(part.optimizer, part.parameters)), saved_groups(manifest)
            changes = hyperparameter_changes(live, saved)
            if hyperparameters == "checkpoint":
                taken, refused = matched_hyperparameters(live, saved)
                matches.append(Match(refused=tuple(refused)))
            wrapped = plan_wrapped(part.optimizer, part.parameters, manifest, declared)
            matches.append(wrapped.match)
    if part.averages is not None:
        matches += match_averages(part.averages, manifest, declared)
    return PartPlan(part, manifest, merged(matches), wrapped, taken, changes)


def states_read(plan: LoadPlan, tensors: Mapping[str, Tensor]) -> list[OptimizerState | None]:
    """Return the state of each part's optimizer, on the devices of its parameters; nothing live changes.

    Args:
        plan: The plan.
        tensors: What was read of its targets.

    Raises:
        CheckpointMismatch: A class of quantised state does not accept its inner tensors.
    """
    return [
        None
        if planned.part.optimizer is None
        else _state_read(planned, planned.part.optimizer, planned.part.own(tensors))
        for planned in plan.parts
    ]


def _state_read(planned: PartPlan, optimizer: Optimizer, read: Mapping[str, Tensor]) -> OptimizerState:
    manifest, parameters = planned.manifest, planned.part.parameters
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
    return made_again(saved, planned.wrapped, parameters)


def execute(plan: LoadPlan, tensors: Mapping[str, Tensor], states: Sequence[OptimizerState | None]) -> list[str]:
    """Copy tensors into the live models, and set their optimizers; return notes about differences.

    Args:
        plan: The plan.
        tensors: What was read of its targets.
        states: The result of `states_read`.
    """
    notes = [*plan.deviations]
    if count := plan.parts[0].match.unsaved:
        notes.append(f"{count} frozen tensors are not in the checkpoint and stay as the model came with them")
    for planned, state in zip(plan.parts, states, strict=True):
        part, label = planned.part, f"{planned.part.name}: " if planned.part.name else ""
        _fill(part, part.own(tensors))
        if part.optimizer is not None and state is not None:
            restore(part.optimizer, part.parameters, state)
            for group, taken in zip(part.optimizer.param_groups, planned.hyperparameters or (), strict=False):
                group.update(taken)
            whose = "this run's value" if planned.hyperparameters is None else "the checkpoint's value"
            notes += [f"{label}optimizer: {change}; {whose} is used" for change in planned.changes]
    return notes


@torch.no_grad()
def _fill(part: Part, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the live ones; averages that the checkpoint lacks are set to their weights."""
    live = model_tensors(part.model)
    for key, staged in tensors.items():
        if key in live:
            local_part(live[key]).copy_(local_part(staged))
    for name, average in (part.averages or {}).items():
        local_part(average).copy_(local_part(tensors.get(AVERAGE + name, part.parameters[name].data)))
