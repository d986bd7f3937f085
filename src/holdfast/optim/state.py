"""Read and restore optimizer state by parameter name, without calling methods of the optimizer.

torch's own routines (`get_optimizer_state_dict`, `load_state_dict`) materialise state by stepping the optimizer, cast
it to the parameter's dtype, need cleared gradients, and leave empty entries in `optimizer.state`. Here state is only
iterated, keyed by canonical name, and kept in its own dtype; absent state stays absent. Quantised state is represented
by the plain tensors that it consists of (optim/wrapped.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UserError
from holdfast.optim.groups import PEAK, STEM
from holdfast.optim.tagged_json import UnknownType, decode, encode
from holdfast.optim.wrapped import BETWEEN, NotSeparable, Wrapped, placed_like, take_apart
from holdfast.parallel.shards import local_part, odd_class
from holdfast.types import host_value

_OF_THE_RUN = frozenset({PEAK, STEM, "name"})
NOT_CHOSEN = _OF_THE_RUN | {"lr", "initial_lr"}
"""Keys of a param group that are not hyper-parameters: they follow from the schedule or name the group."""


class UnsavableOptimizer(UserError):  # noqa: N818 - the name says what is wrong
    """An optimizer whose state has no written form; raised when the optimizer is built, before the first step."""


@dataclass(frozen=True)
class GroupState:
    """A param group without its tensors."""

    parameters: tuple[str, ...]
    """Canonical names."""
    hyperparameters: Mapping[str, Any]
    """Tagged JSON."""


@dataclass(frozen=True)
class OptimizerState:
    """The state and the param groups of an optimizer, by parameter name."""

    kind: str
    """Qualified name of the optimizer's class."""
    groups: tuple[GroupState, ...]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Parameter name -> state key -> tensor, sharded like the parameter or replicated"""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameter name -> state key -> tagged JSON, for state that is not a tensor"""
    wrapped: Mapping[str, Mapping[str, Wrapped]] = field(default_factory=dict)
    """Parameter name -> state key -> record of a quantised tensor, whose inner tensors are in `tensors` under
    <state key>/<inner name>"""


def qualified_name(value: object) -> str:
    """Return module and name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def names_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Return the canonical name of each parameter of an optimizer, by identity.

    Raises:
        UnsavableOptimizer: It holds a parameter that the model does not have, or a frozen one.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UnsavableOptimizer(
                    f"{qualified_name(optimizer)} holds a parameter of shape {list(parameter.shape)} that is not the "
                    "model's. Build the optimizer after the model is sharded."
                )
            if not parameter.requires_grad:
                raise UnsavableOptimizer(
                    f"{qualified_name(optimizer)} holds {names[id(parameter)]}, which is frozen. Give it the trained "
                    "parameters only."
                )
    return names


def keep_state_on_host(optimizer: Optimizer) -> None:
    """Declare that an optimizer keeps its state in host memory, wherever its parameters are."""
    vars(optimizer)[_ON_HOST] = True


def state_device(optimizer: Optimizer, parameter: Tensor) -> torch.device:
    """Return where an optimizer keeps the state of a parameter: beside it, or in host memory."""
    return torch.device("cpu") if vars(optimizer).get(_ON_HOST) else local_part(parameter.detach()).device


_ON_HOST = "_holdfast_state_on_host"


def collect(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Read an optimizer's state; nothing in it changes.

    Raises:
        UnsavableOptimizer: Something in it cannot be written down.
    """
    names = names_of(optimizer, parameters)
    collected = CollectedState(optimizer)
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or not state:  # empty entries are left behind by whoever indexed the state
            continue
        for key, value in state.items():
            collected.add(name, str(key), value, parameter)
    return collected.state(groups_of(optimizer, names))


@dataclass
class CollectedState:
    """An optimizer's state while it is read."""

    optimizer: Optimizer
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrapped: dict[str, dict[str, Wrapped]] = field(default_factory=dict)

    def add(self, name: str, key: str, value: Any, parameter: Tensor) -> None:
        """Take one value of a parameter's state.

        Raises:
            UnsavableOptimizer: The value cannot be written down.
        """
        label = f"state {key!r} of {name}"
        if not isinstance(value, Tensor):
            self.values.setdefault(name, {})[key] = tagged(value, label, self.optimizer)
        elif odd_class(value) is None:
            _check_sharding(value, parameter, label, self.optimizer)
            self.tensors.setdefault(name, {})[key] = value
        else:
            record, components = separated(value, label, self.optimizer)
            self.wrapped.setdefault(name, {})[key] = record
            slots = self.tensors.setdefault(name, {})
            slots |= {f"{key}{BETWEEN}{component}": tensor for component, tensor in components.items()}

    def state(self, groups: tuple[GroupState, ...]) -> OptimizerState:
        """Return the collected optimizer state."""
        return OptimizerState(qualified_name(self.optimizer), groups, self.tensors, self.values, self.wrapped)


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[GroupState, ...]:
    """Return the param groups as names and tagged hyper-parameters.

    Raises:
        UnsavableOptimizer: A hyper-parameter has a type that cannot be written down.
    """
    return tuple(
        GroupState(
            tuple(names[id(parameter)] for parameter in group["params"]),
            {
                key: tagged(value, f"hyper-parameter {key!r}", optimizer)
                for key, value in group.items()
                if key != "params"
            },
        )
        for group in optimizer.param_groups
    )


def restore(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: OptimizerState) -> None:
    """Set an optimizer's state, keeping saved dtypes; parameters without saved state keep their constructor's state.

    Gradients and hyper-parameters are not touched. The optimizer takes over the tensors of `saved` without a copy.

    Raises:
        NotSeparable: A quantised tensor cannot be made again; nothing was changed.
    """
    saved = put_together(saved, parameters)
    saved_names = saved.tensors.keys() | saved.values.keys()
    names = {id(parameter): name for name, parameter in parameters.items()}
    # In the order of parameters, the same on every rank: somebody may gather what they find here.
    by_name = {name: parameter for name, parameter in parameters.items() if name in saved_names}
    as_built = {parameter: state for parameter, state in optimizer.state.items() if _as_built(state)}
    # Cleared and updated in place, since an optimizer that wraps another one shares its `state` dictionary.
    optimizer.state.clear()
    optimizer.state.update({key: value for key, value in as_built.items() if names.get(id(key)) not in by_name})
    # torch keeps step counters on the host, unless a fused kernel counts them.
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for name, parameter in by_name.items():
        state: dict[str, Any] = {}
        for key, tensor in saved.tensors.get(name, {}).items():
            device = state_device(optimizer, parameter) if id(parameter) in on_device else "cpu"
            state[key] = tensor if tensor.ndim else tensor.to(device)
        state |= {key: decode(value) for key, value in saved.values.get(name, {}).items()}
        optimizer.state[parameter] = state


def matched_hyperparameters(
    live: Sequence[GroupState], saved: Sequence[GroupState]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Match saved hyper-parameters to the live param groups, which may divide parameters differently.

    Parameters that were not saved take the values of the others in their group. Where the saved learning rates or
    names of a group's parameters differ, the live ones stay. Names and peaks of groups that a run's configuration made
    always stay, as its schedule does.

    Returns:
        The hyper-parameters that each live group takes, and a sentence for each that its parameters disagree on.
    """
    saved_values = {name: group.hyperparameters for group in saved for name in group.parameters}
    taken: list[dict[str, Any]] = []
    refused = []
    for group in live:
        of_the_run = _OF_THE_RUN if PEAK in group.hyperparameters else frozenset()
        first: dict[str, tuple[str, Any]] = {}
        differing: set[str] = set()
        for name in group.parameters:
            for key, value in saved_values.get(name, {}).items():
                first_name, first_value = first.setdefault(key, (name, value))
                if first_value == value:
                    continue
                if key not in differing | NOT_CHOSEN:
                    refused.append(
                        f"{first_name} has {key} {decode(first_value)} there and {name} {decode(value)}, and this "
                        "optimizer updates them in one group (give them groups of their own, or keep this run's "
                        "hyper-parameters)"
                    )
                differing.add(key)
        taken.append({key: decode(value) for key, (_, value) in first.items() if key not in differing | of_the_run})
    return taken, refused


def hyperparameter_words(optimizer: Optimizer) -> str:
    """Describe an optimizer's hyper-parameters without the scheduled rate, such as "betas=(0.9, 0.999), eps=1e-08".

    Values that differ between groups are joined by "and"; options that are None or False are left out.
    """
    values: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            distinct = values.setdefault(key, [])
            if key not in NOT_CHOSEN | {"params"} and not any(
                value is listed or str(value) == str(listed) for listed in distinct
            ):
                distinct.append(value)
    settings = {
        key: distinct
        for key, distinct in values.items()
        if any(value is not None and value is not False for value in distinct)
    }
    return ", ".join(f"{key}={' and '.join(map(str, distinct))}" for key, distinct in settings.items())


def hyperparameter_changes(live: Sequence[GroupState], saved: Sequence[GroupState]) -> list[str]:
    """Return one line per hyper-parameter that differs for some parameter, other than the scheduled rate."""
    saved_values = {name: group.hyperparameters for group in saved for name in group.parameters}
    changes: dict[str, str] = {}
    for group in live:
        for name in group.parameters:
            for key, value in group.hyperparameters.items():
                old = saved_values.get(name, {}).get(key, value)
                if key not in NOT_CHOSEN and old != value:
                    changes.setdefault(f"{key}: {decode(old)} in the checkpoint, {decode(value)} now", name)
    return [f"{change} (for {name} and its group)" for change, name in changes.items()]


def _as_built(state: Mapping[str, Any]) -> bool:
    """Return whether the constructor made this state and no step has changed it, as with Adagrad's sums."""
    steps = state.get("step")
    if isinstance(steps, Tensor):
        steps = host_value(steps.float(), "steps of an optimizer's states, as it was built")
    return steps is not None and float(steps) == 0.0


def tagged(value: Any, label: str, optimizer: Optimizer) -> Any:
    """Return a value's written form.

    Raises:
        UnsavableOptimizer: The value has no written form.
    """
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableOptimizer(
            f"{qualified_name(optimizer)} cannot be saved: {label} is a {error}, which has no written form. Use a "
            "number, text, dtype, tuple or tensor instead."
        ) from None


def separated(value: Tensor, label: str, optimizer: Optimizer) -> tuple[Wrapped, dict[str, Tensor]]:
    """Split a quantised tensor into a record of its class and its inner tensors.

    Raises:
        UnsavableOptimizer: It cannot be taken apart.
    """
    try:
        return take_apart(value)
    except NotSeparable as error:
        raise UnsavableOptimizer(
            f"{qualified_name(optimizer)} cannot be saved: {label} is a {odd_class(value)}, {error}; its parts would "
            "be lost. Use an optimizer that keeps its state in plain tensors, of whatever dtype."
        ) from error


def _check_sharding(value: Tensor, parameter: Tensor, label: str, optimizer: Optimizer) -> None:
    """Check that a state tensor's sharding is known, so that it can be restored.

    Raises:
        UnsavableOptimizer: It is a plain tensor with the shape of a shard, or a DTensor that holds partial sums.
    """
    prefix = f"{qualified_name(optimizer)} cannot be saved: {label}"
    if not isinstance(parameter, DTensor):
        return
    if not isinstance(value, DTensor):
        if value.ndim and value.shape in {parameter.shape, local_part(parameter).shape}:
            raise UnsavableOptimizer(
                f"{prefix} is a plain tensor beside a sharded parameter. Make it with torch.zeros_like(parameter), so "
                "that it is sharded as well."
            )
    elif value.device_mesh != parameter.device_mesh or any(placement.is_partial() for placement in value.placements):
        raise UnsavableOptimizer(f"{prefix} is a part of a sum ({value.placements}). Redistribute it first.")


def put_together(saved: OptimizerState, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the state with every quantised tensor reconstructed in its class; nothing live changes.

    Raises:
        NotSeparable: A class does not accept its inner tensors.
    """
    tensors = {name: dict(keys) for name, keys in saved.tensors.items()}
    for name, records in saved.wrapped.items():
        for key, record in records.items():
            components = {component: tensors[name].pop(f"{key}{BETWEEN}{component}") for component in record.parts}
            tensors[name][key] = whole_of(record, components, parameters[name].data)
    return OptimizerState(saved.kind, saved.groups, tensors, saved.values)


def whole_of(record: Wrapped, components: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
    """Reconstruct one quantised tensor from this rank's inner tensors, sharded like its parameter.

    Raises:
        NotSeparable: Its class does not accept them.
    """
    sharded = isinstance(parameter, DTensor) and record.shape == tuple(parameter.shape)
    shape = local_part(parameter).shape if sharded else record.shape
    local = record.put_together({component: local_part(tensor) for component, tensor in components.items()}, shape)
    return placed_like(parameter, local, record.shape) if sharded else local
