"""Optimizer state by parameter name: taken out and put back without the optimizer's help.

torch's own routines materialise state by stepping the optimizer, cast it to the parameter's dtype, need clean
gradients, and fill `optimizer.state` with empty entries when it is indexed. Here state is only iterated, keyed by
canonical name, kept in its own dtype, and absent state stays absent.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import UserError
from holdfast.optim.tagged import UnknownType, decode, encode
from holdfast.parallel.materialise import odd_class


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
    """Parameter name -> state key -> tagged JSON, for state that is no tensor"""


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
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or not state:  # empty entries are left behind by whoever indexed the state
            continue
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors.setdefault(name, {})[str(key)] = _plain(value, f"state {key!r} of {name}", optimizer)
            else:
                values.setdefault(name, {})[str(key)] = _tagged(value, f"state {key!r} of {name}", optimizer)
    return OptimizerState(qualified_name(optimizer), groups_of(optimizer, names), tensors, values)


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[GroupState, ...]:
    """Return the param groups as names and tagged hyper-parameters.

    Raises:
        UnsavableOptimizer: A hyper-parameter has a type that cannot be written down.
    """
    return tuple(
        GroupState(
            tuple(names[id(parameter)] for parameter in group["params"]),
            {
                key: _tagged(value, f"hyper-parameter {key!r}", optimizer)
                for key, value in group.items()
                if key != "params"
            },
        )
        for group in optimizer.param_groups
    )


def restore(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: OptimizerState) -> None:
    """Put state back, in its own dtypes; parameters without saved state get none.

    Live gradients do not matter, and hyper-parameters stay as they are. Tensors of `saved` become the optimizer's own.
    """
    known = saved.tensors.keys() | saved.values.keys()
    # In the order of parameters, the same on every rank: somebody may gather what they find here.
    by_name = {name: parameter for name, parameter in parameters.items() if name in known}
    optimizer.state.clear()
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for name, parameter in by_name.items():
        state: dict[str, Any] = {}
        for key, tensor in saved.tensors.get(name, {}).items():
            # torch keeps step counters on the host, unless a fused kernel counts them.
            counter = tensor.ndim == 0 and id(parameter) not in on_device
            state[key] = tensor.cpu() if counter else tensor.to(parameter.device) if tensor.ndim == 0 else tensor
        state |= {key: decode(value) for key, value in saved.values.get(name, {}).items()}
        optimizer.state[parameter] = state


_NOT_COMPARED = {"lr", "initial_lr", "name"}
"""What the schedule sets, and what only people read."""


def matched_hyperparameters(
    live: Sequence[GroupState], saved: Sequence[GroupState]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each live group takes from the saved groups of its parameters, and words about what it cannot take.

    Parameters that were not saved take what the others of their group do. The schedule's rate and a group's name are
    left as they are where the saved ones differ.
    """
    then = {name: group.hyperparameters for group in saved for name in group.parameters}
    taken: list[dict[str, Any]] = []
    refused = []
    for group in live:
        first: dict[str, tuple[str, Any]] = {}
        differing: set[str] = set()
        for name in group.parameters:
            for key, value in then.get(name, {}).items():
                other, known = first.setdefault(key, (name, value))
                if known == value:
                    continue
                if key not in differing | _NOT_COMPARED:
                    refused.append(
                        f"{other} has {key} {decode(known)} there and {name} {decode(value)}, and this optimizer "
                        "updates them in one group (give them groups of their own, or keep this run's hyper-parameters)"
                    )
                differing.add(key)
        taken.append({key: decode(value) for key, (_, value) in first.items() if key not in differing})
    return taken, refused


def hyperparameter_changes(live: Sequence[GroupState], saved: Sequence[GroupState]) -> list[str]:
    """Return one line per hyper-parameter that differs for some parameter, other than the scheduled rate."""
    then = {name: group.hyperparameters for group in saved for name in group.parameters}
    changes: dict[str, str] = {}
    for group in live:
        for name in group.parameters:
            for key, value in group.hyperparameters.items():
                old = then.get(name, {}).get(key, value)
                if key not in _NOT_COMPARED and old != value:
                    changes.setdefault(f"{key}: {old} in the checkpoint, {value} now", name)
    return [f"{change} (for {name} and its group)" for change, name in changes.items()]


def _tagged(value: Any, what: str, optimizer: Optimizer) -> Any:
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableOptimizer(
            f"{qualified_name(optimizer)} cannot be saved: {what} is a {error}, which has no written form. Use a "
            "number, text, dtype, tuple or tensor instead."
        ) from None


def _plain(value: Tensor, what: str, optimizer: Optimizer) -> Tensor:
    kind = odd_class(value)
    if kind is not None:
        raise UnsavableOptimizer(
            f"{qualified_name(optimizer)} cannot be saved: {what} is a {kind}, a subclass of torch.Tensor whose parts "
            "would be lost. Use an optimizer that keeps its state in plain tensors, of whatever dtype."
        )
    return value


def inert_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the state the optimizer will have after its first step, with zeros in it; the optimizer is not touched.

    What it will hold is learned from a copy of its class and hyper-parameters that takes one step on tiny parameters
    of the same dtypes and numbers of dimensions.
    """
    names = names_of(optimizer, parameters)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        known: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
        for parameter in group["params"]:
            name, shape = names[id(parameter)], (parameter.ndim, parameter.dtype)
            if shape not in known:
                known[shape] = _state_after_one_step(optimizer, group, parameter)
            for key, value in known[shape].items():
                if isinstance(value, Tensor):
                    _plain(value, f"state {key!r} of {name}", optimizer)
                    is_like = value.ndim == parameter.ndim and value.ndim > 0
                    made = torch.zeros_like(parameter, dtype=value.dtype) if is_like else torch.zeros_like(value)
                    tensors.setdefault(name, {})[str(key)] = made
                else:
                    values.setdefault(name, {})[str(key)] = _tagged(value, f"state {key!r} of {name}", optimizer)
    return OptimizerState(qualified_name(optimizer), groups_of(optimizer, names), tensors, values)


def _state_after_one_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    stand_in = nn.Parameter(torch.zeros((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.zeros_like(stand_in)
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # a user's hooks see real steps only
    twin.__dict__.pop("step", None)  # a learning rate scheduler binds the real optimizer's step here
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = [{**group, "params": [stand_in]}]
    twin.step()
    return dict(twin.state[stand_in])
