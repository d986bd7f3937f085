"""Models that are trained beside the one a checkpoint is about, such as a policy's critic, each with its optimizer.

Their tensors are in the same DCP under names of their own: critic.model.<parameter>, critic.optim.<parameter>.<key>. So
one commit, one verification and one comparison cover all of them, and whoever reads the model alone sees no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.matching import Declared, Plan, Wanted, allow, plan_model, plan_optimizer
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.parallel.materialise import sharded_parameters

COMPANIONS = "companions"
"""Key of a manifest's `optimizer` that holds those of companions, by name."""


class Companion(NamedTuple):
    """A model to be read, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer


def joined(snapshot: Snapshot, companions: Mapping[str, Snapshot]) -> Snapshot:
    """Return one snapshot that holds those of companions too."""
    tensors, trained, ties = dict(snapshot.tensors), set(snapshot.trained), dict(snapshot.ties)
    optimizers = dict(snapshot.companions)
    for name, theirs in companions.items():
        tensors |= {_key(name, key): tensor for key, tensor in theirs.tensors.items()}
        trained |= {_key(name, key) for key in theirs.trained}
        ties |= {_key(name, first): tuple(_key(name, other) for other in tied) for first, tied in theirs.ties.items()}
        if theirs.optimizer is not None:
            optimizers[name] = theirs.optimizer
    return replace(
        snapshot,
        tensors=tensors,
        trained=frozenset(trained),
        ties=ties,
        companions=optimizers,
        contents=(*snapshot.contents, *companions),
    )


def _key(name: str, key: str) -> str:
    return f"{name}.{key}"


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
    plan: Plan,
    companions: Mapping[str, Companion],
    manifest: Manifest,
    declared: Declared,
    hyperparameters: Literal["live", "checkpoint"],
) -> dict[str, Plan]:
    """Plan what companions take, and note in the model's plan what they refuse; those without a plan stay as they are.

    Args:
        plan: Of the model.
        companions: The live ones, by name.
        manifest: The checkpoint's.
        declared: What may differ; patterns are searched in a companion's own names.
        hyperparameters: As in `reader.load`.
    """
    found: dict[str, Plan] = {}
    for name in sorted({*companions, *(manifest.optimizer or {}).get(COMPANIONS, {})}):
        part = part_of(manifest, name)
        if name not in companions:
            allow(plan, declared.drop, name, f"the checkpoint has a {name}, and this run has none", "resume.drop")
        elif not part.tensors:
            allow(plan, declared.add, name, f"the checkpoint has no {name}, and this run has one", "resume.add")
        else:
            model, optimizer = companions[name]
            theirs = found[name] = Plan()
            parameters, taken = sharded_parameters(model), hyperparameters == "checkpoint"
            plan_model(theirs, model, parameters, part, declared)
            plan_optimizer(theirs, optimizer, parameters, part, declared, hyperparameters=taken)
            plan.refused += [f"{name}: {line}" for line in theirs.refused]
            plan.deviations += [f"{name}: {line}" for line in theirs.deviations]
    return found


def wanted_of(plans: Mapping[str, Plan]) -> dict[str, Wanted]:
    """Return what companions take, under the names of the DCP."""
    return {_key(name, key): each for name, plan in plans.items() for key, each in plan.wanted.items()}
