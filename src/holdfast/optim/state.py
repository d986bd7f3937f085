"""Optimizer state by parameter name: taken out and put back without the optimizer's help.

torch's own routines materialise state by stepping the optimizer, cast it to the parameter's dtype, need clean
gradients, and fill `optimizer.state` with empty entries when it is indexed. Here state is only iterated, keyed by
canonical name, kept in its own dtype, and absent state stays absent.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import HoldfastError
from holdfast.optim.tagged import UnknownType, decode, encode

NOT_CHOSEN = frozenset({"lr", "initial_lr", "name"})
"""Keys of a param group that follow the schedule, or only name it."""


class UnsavableOptimizer(HoldfastError):  # noqa: N818 - the name says what is wrong
    """An optimizer holds something that cannot be saved; raised when it is built, not hours later."""

    exit_code = 2


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
                tensors.setdefault(name, {})[str(key)] = value
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


def set_hyperparameters(optimizer: Optimizer, saved: OptimizerState) -> None:
    """Take every hyper-parameter from the saved groups, matched by the parameters they hold.

    Raises:
        UnsavableOptimizer: The groups hold other parameters.
    """
    if len(saved.groups) != len(optimizer.param_groups):
        raise UnsavableOptimizer(
            f"The checkpoint has {len(saved.groups)} param groups, the optimizer {len(optimizer.param_groups)}."
        )
    for group, before in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update({key: decode(value) for key, value in before.hyperparameters.items()})


def hyperparameter_words(optimizer: Optimizer) -> str:
    """Return what an optimizer is set to, the scheduled rate left out, such as "betas=(0.9, 0.999), eps=1e-08".

    Where groups differ their values stand side by side; what is off is left out.
    """
    values: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for key, value in group.items():
            held = values.setdefault(key, [])
            if key not in NOT_CHOSEN | {"params"} and not any(
                value is each or str(value) == str(each) for each in held
            ):
                held.append(value)
    shown = {
        key: held for key, held in values.items() if any(value is not None and value is not False for value in held)
    }
    return ", ".join(f"{key}={' and '.join(map(str, held))}" for key, held in shown.items())


def hyperparameter_changes(live: OptimizerState, saved: OptimizerState) -> list[str]:
    """Return one line per hyper-parameter that differs for some parameter, other than the scheduled rate."""
    then = {name: group.hyperparameters for group in saved.groups for name in group.parameters}
    changes: dict[str, str] = {}
    for group in live.groups:
        for name in group.parameters:
            for key, value in group.hyperparameters.items():
                old = then.get(name, {}).get(key, value)
                if key not in NOT_CHOSEN and old != value:
                    changes.setdefault(f"{key}: {decode(old)} in the checkpoint, {decode(value)} now", name)
    return [f"{change} (for {name} and its group)" for change, name in changes.items()]


def _tagged(value: Any, what: str, optimizer: Optimizer) -> Any:
    try:
        return encode(value)
    except UnknownType as error:
        raise UnsavableOptimizer(
            f"{qualified_name(optimizer)} cannot be saved: {what} is a {error}, which has no written form. Use a "
            "number, text, dtype, tuple or tensor instead."
        ) from None


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
