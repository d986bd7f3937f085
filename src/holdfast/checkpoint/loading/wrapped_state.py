"""Load quantised optimizer state, also into another number of shards.

The inner tensors of quantised state are read like all tensors. With the same number of shards, or another one whose
bounds coincide with those of blocks, the state is restored bit for bit. Otherwise it is refused, or, if `cast` is
declared, dequantised and quantised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import OPTIM
from holdfast.checkpoint.loading.matching import Declared, Match, Target, allowed, merged
from holdfast.optim.state import OptimizerState, put_together, qualified_name, whole_of
from holdfast.optim.state_template import inert_state
from holdfast.optim.wrapped import (
    BETWEEN,
    LISTED,
    InnerTensor,
    NotSeparable,
    Wrapped,
    from_plain,
    placed_like,
    shards_of,
)
from holdfast.parallel.shards import local_part, local_rows


@dataclass(frozen=True)
class WrappedPlan:
    """The quantised state that will be reconstructed."""

    match: Match = field(default_factory=Match)
    """Its inner tensors, and deviations."""
    exact: Mapping[str, Mapping[str, Wrapped]] = field(default_factory=dict)
    """Parameter name -> state key -> record of state that is restored bit for bit."""
    cast: Mapping[str, Mapping[str, Wrapped]] = field(default_factory=dict)
    """Parameter name -> state key -> record of state that is dequantised and quantised again."""
    made_here: OptimizerState | None = None
    """State as this run's optimizer creates it, the template for `cast`; None if nothing is cast."""


def records(manifest: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """Return a manifest's records of quantised state: parameter name -> state key -> plain record."""
    by_name: Mapping[str, Mapping[str, Any]] = (manifest.optimizer or {}).get("wrapped", {})
    return by_name


def plan_wrapped(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], manifest: Manifest, declared: Declared
) -> WrappedPlan:
    """Return the plan of quantised optimizer state; all ranks call this together.

    Raises:
        CheckpointCorrupt: A record does not fit its tensors.
    """
    stored = records(manifest)
    if not stored or manifest.optimizer is None or manifest.optimizer["kind"] != qualified_name(optimizer):
        return WrappedPlan()
    matches: list[Match] = []
    exact: dict[str, dict[str, Wrapped]] = {}
    cast: dict[str, dict[str, Wrapped]] = {}
    for name, slot, plain in _wanted(optimizer, parameters, stored):
        if plain["class"] not in LISTED:
            refused = (
                f"state {slot} of {name} is a {plain['class']}, which is none of torchao's optimizer states; it is not "
                "imported. Start a new run from these weights with another run.name and checkpoint.init_from"
            )
            matches.append(Match(refused=(refused,)))
            continue
        record = _checked(plain, manifest, name, slot)
        parameter = parameters[name].data
        shards = shards_of(parameter) if record.shape == tuple(parameter.shape) else 1
        why = None if shards == record.shards else record.why_not_cut(shards)
        matches.append(_match(record, name, slot, parameter, manifest, declared, shards, why))
        (exact if why is None else cast).setdefault(name, {})[slot] = record
    return WrappedPlan(merged(matches), exact, cast, inert_state(optimizer, parameters) if cast else None)


def _wanted(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], stored: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str, Any]]:
    """Return parameter name, state key and record for the parameters that the optimizer updates."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = sorted(name for name in stored if name in parameters and id(parameters[name]) in updated)
    return [(name, slot, plain) for name in names for slot, plain in sorted(stored[name].items())]


def _checked(plain: Mapping[str, Any], manifest: Manifest, name: str, slot: str) -> Wrapped:
    try:
        record = from_plain(plain)
        fits = all(
            _fits(record, how, manifest.tensors[_key(name, slot, component)].shape)
            for component, how in record.parts.items()
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        fits = False
    if not fits:
        raise CheckpointCorrupt(f"The manifest's record of state {slot} of {name} does not fit its tensors.")
    return record


def _fits(record: Wrapped, how: InnerTensor, shape: tuple[int, ...]) -> bool:
    rows = shape[0] * how.every == record.shape[0] if how.every else shape[0] == record.shards
    return rows and record.shards > 0 and how.every >= 0 and how.split > 0 and (how.split == 1 or shape[1] == how.split)


def _key(name: str, slot: str, component: str) -> str:
    return f"{OPTIM}{name}.{slot}{BETWEEN}{component}"


def _match(  # noqa: PLR0913, PLR0917 - one state of one parameter, and what is known of it
    record: Wrapped,
    name: str,
    slot: str,
    parameter: Tensor,
    manifest: Manifest,
    declared: Declared,
    shards: int,
    why: str | None,
) -> Match:
    """Return the match of one quantised tensor; `why` says why it cannot be restored bit for bit, None if it can."""
    targets = {}
    for component, how in record.parts.items():
        entry = manifest.tensors[_key(name, slot, component)]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        live = tensor if why is not None else _layout(how, tensor, parameter, shards, record)
        targets[_key(name, slot, component)] = Target(live, entry)
    if why is None:
        return Match(targets)
    difference = (
        f"state {slot} of {name} is a {record.kind} that {record.shards} shards were saved of, and {why}, so it "
        "cannot come back bit for bit; dequantise it and quantise it anew"
    )
    return merged([Match(targets), allowed(declared.cast, name, difference, "resume.cast")])


def _layout(how: InnerTensor, tensor: Tensor, parameter: Tensor, shards: int, record: Wrapped) -> Tensor:
    """Return a meta tensor with the sharding in which this rank needs an inner tensor."""
    if not isinstance(parameter, DTensor) or record.shape != tuple(parameter.shape):
        return tensor
    if not how.every and shards != record.shards:
        return tensor  # all rows of it are equal
    rows = local_part(parameter).shape[0] // how.every if how.every else 1
    return placed_like(parameter, tensor[:rows], tensor.shape)


def made_again(saved: OptimizerState, planned: WrappedPlan, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return optimizer state with every quantised tensor reconstructed in its class; nothing live changes.

    Args:
        saved: State that was read, which has the inner tensors of quantised ones.
        planned: Plan of this checkpoint's quantised state.
        parameters: Parameters of the model by canonical name.

    Raises:
        CheckpointMismatch: A class does not accept its inner tensors, or cannot quantise.
    """
    tensors = {name: dict(keys) for name, keys in saved.tensors.items()}
    state = OptimizerState(saved.kind, saved.groups, tensors, saved.values, planned.exact)
    try:
        for name, slots in planned.cast.items():
            for slot, record in slots.items():
                components = {
                    component: local_part(tensors[name].pop(f"{slot}{BETWEEN}{component}"))
                    for component in record.parts
                }
                template = _template(planned, name, slot, parameters[name].data)
                tensors[name][slot] = _requantised(record, components, parameters[name].data, template)
        return put_together(state, parameters)
    except NotSeparable as error:
        raise CheckpointMismatch(f"Optimizer state of the checkpoint cannot be used: {error}.") from error


def _template(planned: WrappedPlan, name: str, slot: str, parameter: Tensor) -> Tensor:
    """Return a state tensor of the class and shape that this run's optimizer creates."""
    assert planned.made_here is not None
    tensors = planned.made_here.tensors.get(name, {})
    record = planned.made_here.wrapped.get(name, {}).get(slot)
    if record is not None:
        components = {component: tensors[f"{slot}{BETWEEN}{component}"].clone() for component in record.parts}
        return whole_of(record, components, parameter)
    return torch.zeros_like(tensors[slot]) if slot in tensors else torch.zeros_like(parameter, requires_grad=False)


def _requantised(record: Wrapped, components: Mapping[str, Tensor], parameter: Tensor, template: Tensor) -> Tensor:
    """Dequantise all saved shards, and quantise this rank's rows of the result into `template`.

    Raises:
        NotSeparable: The saved class cannot be constructed.
    """
    components = {name: component.cpu() for name, component in components.items()}
    numbers = torch.empty(record.shape, dtype=torch.float64 if record.dtype == "float64" else torch.float32)
    rows = record.rows_per_shard(record.shards)
    for shard in range(record.shards):
        shape = record.shape_of(shard, record.shards)
        shard_parts = {}
        for name, how in record.parts.items():
            start, size = (shard * rows // how.every, shape[0] // how.every) if how.every else (shard, 1)
            shard_parts[name] = components[name][start : start + size]
        into = numbers[shard * rows : shard * rows + shape[0]] if record.shards > 1 else numbers
        into.copy_(record.put_together(shard_parts, shape))
    local = template._local_tensor if isinstance(template, DTensor) else template
    local.copy_((numbers[local_rows(parameter)] if isinstance(template, DTensor) else numbers).to(local.device))
    return template
