"""Models beside the one a checkpoint is about: those with an optimizer of their own, such as a policy's critic, and
those that follow its weights, such as a reference that is not for ever the model at start.

Their tensors are in the same DCP under names of their own: critic.model.<parameter>, critic.optim.<parameter>.<key>. So
one commit, one verification and one comparison cover all of them, and whoever reads the model alone sees no difference.
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
    """A model to be saved or read, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer | None
    """None of a frozen model that follows."""
    moved: Collection[str] = ()
    """Parameters of such a one that change; the others are as the model came with them, and stay so."""

    def held(self) -> LiveTensors:
        """Find what is saved of it."""
        return hold(self.model, frozen=self.optimizer is not None, later=self.moved)


def part_of(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest as it would be if the checkpoint held this companion alone."""
    optimizers: Mapping[str, Any] = (manifest.optimizer or {}).get(COMPANIONS, {})
    return replace(
        manifest,
        tensors=_stripped(manifest.tensors, name),
        ties={},
        optimizer=optimizers.get(name),
        contents=("model",),
    )


def own_tensors(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return a companion's of all tensors that were read, under its own names."""
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
    """Plan what companions take, and note in the model's plan what they refuse; those without a plan stay as they are.

    Args:
        plan: Of the model.
        companions: The live ones, by name.
        manifest: The checkpoint's.
        declared: What may differ; patterns are searched in a companion's own names.
        hyperparameters: As in `reader.load`.
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
    """Return the state of a companion's optimizer, as `optimizer_state` does; None of one that has none."""
    model, optimizer, _ = companion
    if optimizer is None:
        return None
    companion_tensors, companion_manifest = own_tensors(tensors, name), part_of(manifest, name)
    return optimizer_state(companion_tensors, optimizer, sharded_parameters(model), companion_manifest, planned.wrapped)


def targets_of(plans: Mapping[str, PlannedLoad]) -> dict[str, Target]:
    """Return what companions take, under the names of the DCP."""
    return {
        companion_key(name, key): target
        for name, planned in plans.items()
        for key, target in planned.plan.targets.items()
    }


class AheadOfStep(Protocol):
    """What a run has made of its next step already, and a checkpoint holds; JSON-ready."""

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return what tells this rank's part; it may be asked later, from any thread."""

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint has, of all ranks."""

    def largest(self) -> list[dict[str, Any]]:
        """Return as much as a checkpoint may have, of all ranks."""
