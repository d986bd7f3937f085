"""What an optimizer's state will be: its names, shapes, dtypes, classes and sharding, learned from stand-ins."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from holdfast.optim.randomness import private_randomness, with_own_generators
from holdfast.optim.state import Collected, OptimizerState, groups_of, names_of
from holdfast.parallel.shards import odd_class

State = dict[str, Any]

_LARGE = 8192
"""Elements of a shard, at least as many as tensors have from which on optimizers quantise."""


def inert_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the state the optimizer will have after its first step, of zeros; nothing else changes.

    What it will hold is learned from a copy of its class and hyper-parameters that takes one step on small parameters
    of the same dtypes, numbers of dimensions and shardings. Where a larger one gets state of a class of its own, whose
    parts follow rules that only the class knows, the copy steps on parameters of the real shapes, one after the other.
    All ranks call this together.
    """
    names = names_of(optimizer, parameters)
    collected = Collected(optimizer)
    for group in optimizer.param_groups:
        samples: dict[tuple[Any, ...], tuple[torch.Size, State]] = {}
        exact: dict[tuple[Any, ...], State] = {}
        for parameter in group["params"]:
            name, kind = names[id(parameter)], (parameter.ndim, parameter.dtype, parameter.numel() == 1)
            if _wraps(optimizer, group, parameter, samples):
                shape = (parameter.shape, parameter.dtype)
                if shape not in exact:
                    twin = nn.Parameter(zeros(parameter.shape, parameter))
                    exact[shape] = _state_after_one_step(optimizer, group, twin)
                state = {key: _as_zeros(value) for key, value in exact[shape].items()}
            else:
                small, learned = samples[kind]
                state = {
                    key: _grown(value, small, parameter) if isinstance(value, Tensor) else value
                    for key, value in learned.items()
                }
            for key, value in state.items():
                collected.add(name, str(key), value, parameter)
    return collected.state(groups_of(optimizer, names))


def _wraps(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    samples: dict[tuple[Any, ...], tuple[torch.Size, State]],
) -> bool:
    """Return whether state of such parameters, small ones or large ones, is of a class of its own."""
    kind = (parameter.ndim, parameter.dtype, parameter.numel() == 1)
    for size in ("small", "large"):
        if size == "large" and (kind[-1] or type(optimizer).__module__.startswith("torch.optim.")):
            return False  # torch's own never quantise
        key = kind if size == "small" else (*kind, size)
        if key not in samples:
            twin = stand_in(parameter) if size == "small" else _large_stand_in(parameter)
            samples[key] = twin.shape, _state_after_one_step(optimizer, group, twin)
        if any(isinstance(value, Tensor) and odd_class(value) is not None for value in samples[key][1].values()):
            return True
    return False


def _as_zeros(value: Any) -> Any:
    """Return zeros in place of a plain tensor; those of classes of their own stay as zero gradients made them."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and odd_class(value) is None else value


def _large_stand_in(parameter: Tensor) -> nn.Parameter:
    """Return a parameter of zeros with many elements on every rank, in a number that blocks of any usual size fit."""
    inner = (8,) * (parameter.ndim - 2) + (64,) * min(1, parameter.ndim - 1)
    rows = _shards(parameter) * -(-_LARGE // math.prod(inner))
    return nn.Parameter(zeros((rows, *inner)[: parameter.ndim], parameter))


def stand_in(parameter: Tensor) -> nn.Parameter:
    """Return a small parameter of zeros, like another in dtype, device, dimensions and sharding.

    Its sides differ, so that a state's sides tell which of the parameter's they follow, and every rank has some rows.
    """
    sides = (2 * max(_shards(parameter), 2) - 1, *range(4, 4 + 2 * parameter.ndim, 2))[: parameter.ndim]
    return nn.Parameter(zeros((1,) * parameter.ndim if parameter.numel() == 1 else sides, parameter))


def _shards(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    axes = [axis for axis, place in enumerate(parameter.placements) if isinstance(place, Shard)]
    return max([parameter.device_mesh.size(axis) for axis in axes], default=1)


def zeros(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros of another shape, in a tensor's sharding and on its device."""
    dtype = like.dtype if dtype is None else dtype
    if not isinstance(like, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=like.device)
    size = torch.Size(shape)
    local_shape, _ = compute_local_shape_and_global_offset(size, like.device_mesh, like.placements)
    strides = torch.empty(size, device="meta").stride()
    local = torch.zeros(local_shape, dtype=dtype, device=like.to_local().device)
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=size, stride=strides)


def _grown(value: Tensor, small: torch.Size, parameter: Tensor) -> Tensor:
    """Return zeros of the shape that a stand-in's state has for the real parameter."""
    if value.shape == small and value.ndim:
        return torch.zeros_like(parameter, dtype=value.dtype)
    sides = dict(zip(small, parameter.shape, strict=True)) if small.numel() != 1 else {}
    return zeros([sides.get(side, side) for side in value.shape], value)


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class, hyper-parameters and generators, over other groups and without a state."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(with_own_generators(vars(optimizer)))
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # a user's hooks see real steps only
    twin.__dict__.pop("step", None)  # a learning rate scheduler binds the real optimizer's step here
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = groups
    return twin


def _state_after_one_step(optimizer: Optimizer, group: Mapping[str, Any], small: nn.Parameter) -> State:
    small.grad = torch.zeros_like(small)
    twin = twin_of(optimizer, [{**group, "params": [small]}])
    with private_randomness():
        twin.step()
    return dict(twin.state[small])
