"""Optimizer state by parameter name: taken out and put back without the optimizer's help.

torch's own routines materialise state by stepping the optimizer, cast it to the parameter's dtype, need clean
gradients, and fill `optimizer.state` with empty entries when it is indexed. Here state is only iterated, keyed by
canonical name, kept in its own dtype, and absent state stays absent. Quantised state is kept as the plain tensors
that it is made of (optim/wrapped.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
"""Keys of a param group that follow the schedule, or only name it."""


class UnsavableOptimizer(UserError):  # noqa: N818 - the name says what is wrong
    """An optimizer holds something that cannot be saved; raised when it is built, not hours later."""


@dataclass(frozen=True)
class GroupState:
    """A param group without its tensors."""

    parameters: tuple[str, ...]
    """Canonical names."""
    hyperparameters: Mapping[str, Any]
    """Tagged JSON."""


@dataclass(frozen=True)
class OptimizerState:
    """Everything an optimizer remembers."""

    kind: str
    """Qualified name of its class."""
    groups: tuple[GroupState, ...]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Parameter name -> state key -> tensor, sharded like the parameter or replicated"""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameter name -> state key -> tagged JSON, for state that is not a tensor"""
    wrapped: Mapping[str, Mapping[str, Wrapped]] = field(default_factory=dict)
    """Parameter name -> state key -> what a quantised tensor is, besides its parts; these are among the tensors, under
    <state key>/<part>"""


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
    """Put state back, in its own dtypes; parameters without saved state keep what their optimizer was built with.

    Live gradients do not matter, and hyper-parameters stay as they are. Tensors of `saved` become the optimizer's own.

    Raises:
        NotSeparable: A quantised tensor cannot be made again; nothing was changed.
    """
    saved = put_together(saved, parameters)
    saved_names = saved.tensors.keys() | saved.values.keys()
    names = {id(parameter): name for name, parameter in parameters.items()}
    # In the order of parameters, the same on every rank: somebody may gather what they find here.
    by_name = {name: parameter for name, parameter in parameters.items() if name in saved_names}
    as_built = {parameter: state for parameter, state in optimizer.state.items() if _as_built(state)}
    optimizer.state.clear()
    optimizer.state.update({key: value for key, value in as_built.items() if names.get(id(key)) not in by_name})
    on_device = _counting_on_device(optimizer)
    for name, parameter in by_name.items():
        state: dict[str, Any] = {}
        for key, tensor in saved.tensors.get(name, {}).items():
            # torch keeps step counters on the host, unless a fused kernel counts them.
            counter = tensor.ndim == 0 and id(parameter) not in on_device
            state[key] = tensor.cpu() if counter else tensor.to(parameter.device) if tensor.ndim == 0 else tensor
        state |= {key: decode(value) for key, value in saved.values.get(name, {}).items()}
        optimizer.state[parameter] = state


def matched_hyperparameters(
    live: Sequence[GroupState], saved: Sequence[GroupState]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each live group takes from the saved groups of its parameters, and words about what it cannot take.

    Parameters that were not saved take what the others of their group do. The schedule's rate and a group's name are
    left as they are where the saved ones differ. Names and peaks of a run's own groups belong to its configuration, as
    its schedule does, and stay.
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
    """Return what an optimizer is set to, the scheduled rate left out, such as "betas=(0.9, 0.999), eps=1e-08".

    Where groups differ their values stand side by side; what is off is left out.
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


def _counting_on_device(optimizer: Optimizer) -> set[int]:
    return {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }


def _as_built(state: Mapping[str, Any]) -> bool:
    """Return whether a constructor made this state and no step has changed it, as Adagrad's sums of squares."""
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
    """Refuse a tensor that could not be restored as it is.

    Raises:
        UnsavableOptimizer: It is one shard that nothing says is one, or a part of a sum.
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
    """Return the state with its parts put together, each class as it was; nothing live changes.

    Raises:
        NotSeparable: A class does not accept its parts.
    """
    tensors = {name: dict(keys) for name, keys in saved.tensors.items()}
    for name, records in saved.wrapped.items():
        for key, record in records.items():
            components = {component: tensors[name].pop(f"{key}{BETWEEN}{component}") for component in record.parts}
            tensors[name][key] = whole_of(record, components, parameters[name].data)
    return OptimizerState(saved.kind, saved.groups, tensors, saved.values)


def whole_of(record: Wrapped, components: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
    """Return one quantised tensor in its parameter's sharding, made of this rank's parts.

    Raises:
        NotSeparable: Its class does not accept them.
    """
    sharded = isinstance(parameter, DTensor) and record.shape == tuple(parameter.shape)
    shape = local_part(parameter).shape if sharded else record.shape
    local = record.put_together({component: local_part(tensor) for component, tensor in components.items()}, shape)
    return placed_like(parameter, local, record.shape) if sharded else local
