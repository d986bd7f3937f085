"""Converts another system's optimizer state to the run's optimizer: the same keys, in dtypes that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.features.rescue.reading.record import ForeignCheckpoint, StoredTensor
from holdfast.optim.state import GroupState, OptimizerState, qualified_name
from holdfast.optim.tagged_json import UnknownType, encode

_COMPENSATION = "compensation"
_SLOTS = {
    "torch.optim.adamw.AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "holdfast.optim.lowbit.AdamWBF16": ("step", "exp_avg", "exp_avg_sq", _COMPENSATION),
    "torch.optim.sgd.SGD": ("momentum_buffer",),
}
"""By optimizer: what it keeps of each parameter."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def planned_states(
    checkpoint: ForeignCheckpoint, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, PlannedTensor]]:
    """Return the state that a run's optimizer goes on with, by parameter and key; nothing is read yet.

    Raises:
        CheckpointMismatch: The optimizer keeps something else.
    """
    kind = qualified_name(optimizer)
    slots = _SLOTS.get(kind)
    if slots is None:
        raise CheckpointMismatch(
            f"{checkpoint.path} holds states of {_adam_or(checkpoint)}, and this run's optimizer is {kind}, whose "
            "state is kept in another form. Set optim.kind: adamw, or import with --export and begin anew."
        )
    _refuse_other_slots(checkpoint, slots, kind)
    planned: dict[str, dict[str, PlannedTensor]] = {}
    for name, stored in checkpoint.states.items():
        parameter = parameters.get(name)
        if parameter is None:
            continue  # the comparison with the model says so
        planned[name] = {slot: _slot(checkpoint, name, slot, stored, parameter) for slot in slots}
    return planned


def _adam_or(checkpoint: ForeignCheckpoint) -> str:
    keys = {slot for slots in checkpoint.states.values() for slot in slots}
    return "AdamW" if "exp_avg_sq" in keys else f"another optimizer ({', '.join(sorted(keys))})"


def _refuse_other_slots(checkpoint: ForeignCheckpoint, slots: tuple[str, ...], kind: str) -> None:
    """Compare keys.

    Raises:
        CheckpointMismatch: One is missing that cannot be made, or is there and has no place.
    """
    if not checkpoint.states:
        return
    keys = {slot for stored in checkpoint.states.values() for slot in stored}
    lacking, extra = set(slots) - keys, keys - set(slots)
    if _COMPENSATION in lacking:
        lacking.remove(_COMPENSATION)
        checkpoint.add("repair", "what rounding left over (compensation) begins at zero: there was none there")
    if extra == {_COMPENSATION} and _is_wide(checkpoint):
        extra.clear()
        checkpoint.add("loss", "what rounding left over (compensation): weights in float32 need none", there=False)
    if extra == {_COMPENSATION}:
        raise CheckpointMismatch(
            f"{checkpoint.path} keeps what rounding left over (compensation), and {kind} has no place for it. Set "
            "optim.kind: adamw_bf16."
        )
    if lacking or extra:
        sides = {"lacks": lacking, "has": extra}
        difference = " and ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in sides.items() if names)
        raise CheckpointMismatch(
            f"{checkpoint.path} is not of this run's optimizer, {kind}: it {difference}. Choose optim.kind as it was "
            "there, or import with --export and begin anew."
        )


def _is_wide(checkpoint: ForeignCheckpoint) -> bool:
    """Return whether no trained weight forgets small updates."""
    weights = checkpoint.weights
    return all(weights[name].dtype.itemsize >= 4 for name in checkpoint.states if name in weights)


def _slot(
    checkpoint: ForeignCheckpoint, name: str, slot: str, stored: Mapping[str, StoredTensor], parameter: nn.Parameter
) -> PlannedTensor:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    tensor = stored.get(slot)
    if tensor is None and slot != _COMPENSATION:
        raise CheckpointMismatch(f"{checkpoint.path} has no {slot} of {name}, which its other parameters have.")
    if tensor is None:
        return PlannedTensor(shape, dtype, lambda: torch.zeros(shape, dtype=dtype))
    if not tensor.shape:
        return PlannedTensor((), torch.float32, lambda: tensor.read().to(torch.float32).reshape(()))
    if tensor.dtype == dtype:
        return PlannedTensor(tensor.shape, dtype, tensor.read)
    if tensor.dtype is torch.bfloat16 and dtype is torch.float32:  # every bfloat16 is a float32
        return PlannedTensor(tensor.shape, dtype, lambda: tensor.read().to(torch.float32))
    raise CheckpointMismatch(
        f"{checkpoint.path}: {slot} is {_dtype_name(tensor.dtype)} there, and the parameters of this run are "
        f"{_dtype_name(dtype)}: making it {_dtype_name(dtype)} would lose digits. Set model.dtype: "
        f"{_dtype_name(tensor.dtype)}."
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described_state(
    checkpoint: ForeignCheckpoint, optimizer: Optimizer, tensors: Mapping[str, Mapping[str, Tensor]]
) -> OptimizerState:
    """Return what a manifest says of the optimizer: this run's class, and the other system's groups and settings."""
    setting_names = {key for group in optimizer.param_groups for key in group} - {"params"}
    groups = tuple(
        GroupState(
            group.names, _settings({key: value for key, value in group.settings.items() if key in setting_names})
        )
        for group in checkpoint.groups
    )
    return OptimizerState(qualified_name(optimizer), groups, tensors)


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in their written form; those that have none, and switches of speed, are left out."""
    written = {}
    for key, value in settings.items():
        if key in {"foreach", "fused", "capturable", "differentiable"}:
            continue
        try:
            written[key] = encode(value)
        except UnknownType:
            continue
    return written


def rate_of(checkpoint: ForeignCheckpoint) -> float | None:
    """Return the learning rate that the optimizer stood at, if all groups have one."""
    rates = {group.settings.get("lr") for group in checkpoint.groups}
    rate = rates.pop() if len(rates) == 1 else None
    return float(rate) if isinstance(rate, int | float) else None
