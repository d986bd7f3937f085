"""Companions: further models in a checkpoint, such as a policy's critic or a reference that follows its weights.

A critic has an optimizer; a following reference has none. Their tensors are in the same files under prefixed
names: critic.model.<parameter>, critic.optim.<parameter>.<key>. One commit and one verification thus cover all of them,
and code that reads only the main model needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import OWN_CONTENTS, TRAINED, LiveTensors, companion_key, hold
from holdfast.checkpoint.loading.matching import Declared, LoadPlan, Target, allow
from holdfast.checkpoint.loading.trained import (
    Hyperparameters,
    PlannedLoad,
    optimizer_state,
    plan_trained,
)
from holdfast.optim.state import OptimizerState
from holdfast.parallel.shards import sharded_parameters

COMPANIONS = "companions"
"""Key of a manifest's `optimizer` that holds those of companions, by name."""


class Companion(NamedTuple):
    """A further model to save or load, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer | None
    """None for a frozen model that follows the trained one."""
    moved: Collection[str] = ()
    """Parameters of a following model that change; only these are saved."""

    def held(self) -> LiveTensors:
        """Return the tensors of the companion that are saved."""
        return hold(self.model, frozen=self.optimizer is not None, later=self.moved)


def part_of(manifest: Manifest, name: str) -> Manifest:
    """Return a manifest that describes only this companion, with its prefix removed from all names."""
    optimizers: Mapping[str, Any] = (manifest.optimizer or {}).get(COMPANIONS, {})
    return replace(
        manifest,
        tensors=_stripped(manifest.tensors, name),
        ties={},
        optimizer=optimizers.get(name),
        contents=("model",),
    )


def own_tensors(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Select a companion's tensors from all that were read, with its prefix removed."""
    return _stripped(tensors, name)


def _stripped(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}


def plan_companions(
    plan: LoadPlan,
    companions: Mapping[str, Companion],
    manifest: Manifest,
    declared: Declared,
    hyperparameters: Hyperparameters,
) -> dict[str, PlannedLoad]:
    """Plan the loads of companions; their mismatches are added to the plan of the main model.

    Args:
        plan: Load plan of the main model.
        companions: The live companions by name.
        manifest: Manifest of the checkpoint.
        declared: Allowed deviations; patterns match names without the companion's prefix.
        hyperparameters: As in `reader.load_state`.

    Returns:
        Plans by name of the companion; companions without one stay as they are.
    """
    planned: dict[str, PlannedLoad] = {}
    for name in sorted({*companions, *manifest.contents} - OWN_CONTENTS):
        companion_manifest = part_of(manifest, name)
        if name not in companions:
            allow(plan, declared.drop, name, f"the checkpoint has a {name}, and this run has none", "resume.drop")
        elif not companion_manifest.tensors:
            allow(plan, declared.add, name, f"the checkpoint has no {name}, and this run has one", "resume.add")
        else:
            model, optimizer, _ = companions[name]
            companion_manifest = (
                companion_manifest if optimizer is not None else replace(companion_manifest, contents=(TRAINED,))
            )
            theirs = planned[name] = PlannedLoad()
            plan_trained(
                theirs, model, sharded_parameters(model), optimizer, companion_manifest, declared, hyperparameters
            )
            plan.refused += [f"{name}: {line}" for line in theirs.plan.refused]
            plan.deviations += [f"{name}: {line}" for line in theirs.plan.deviations]
    return planned


def companion_state(
    name: str, companion: Companion, planned: PlannedLoad, manifest: Manifest, tensors: Mapping[str, Tensor]
) -> OptimizerState | None:
    """Return the state of a companion's optimizer, as `optimizer_state` does; None if it has no optimizer."""
    model, optimizer, _ = companion
    if optimizer is None:
        return None
    companion_tensors, companion_manifest = own_tensors(tensors, name), part_of(manifest, name)
    return optimizer_state(companion_tensors, optimizer, sharded_parameters(model), companion_manifest, planned.wrapped)


def targets_of(plans: Mapping[str, PlannedLoad]) -> dict[str, Target]:
    """Return all companions' targets under their prefixed names."""
    return {
        companion_key(name, key): target
        for name, planned in plans.items()
        for key, target in planned.plan.targets.items()
    }


class AheadOfStep(Protocol):
    """Results for the next step that a run has computed ahead, such as rollouts; a checkpoint stores them as JSON."""

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that yields this rank's results; it may be called later, from any thread."""

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError where the results of a checkpoint are not what `finished` yields."""

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over the results of all ranks from a checkpoint."""

    def largest(self) -> list[dict[str, Any]]:
        """Return results of the largest size that a checkpoint may hold, of all ranks, for the rehearsal."""
