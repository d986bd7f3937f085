"""What an optimizer's state will be: its names, shapes, dtypes and sharding, learned from stand-ins."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from holdfast.optim.state import OptimizerState, groups_of, names_of, plain, qualified_name, tagged

State = dict[str, Any]


def inert_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the state the optimizer will have after its first step, with zeros in it; the optimizer is not touched.

    What it will hold is learned from a copy of its class and hyper-parameters that takes one step on small parameters
    of the same dtypes, numbers of dimensions and shardings. All ranks call this together.
    """
    names = names_of(optimizer, parameters)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        known: dict[tuple[Any, ...], tuple[torch.Size, State]] = {}
        for parameter in group["params"]:
            name, kind = names[id(parameter)], (parameter.ndim, parameter.dtype, parameter.numel() == 1)
            if kind not in known:
                small = stand_in(parameter)
                known[kind] = small.shape, _state_after_one_step(optimizer, group, small)
            shape, state = known[kind]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    plain(value, f"state {key!r} of {name}", optimizer)
                    tensors.setdefault(name, {})[str(key)] = _grown(value, shape, parameter)
                else:
                    values.setdefault(name, {})[str(key)] = tagged(value, f"state {key!r} of {name}", optimizer)
    return OptimizerState(qualified_name(optimizer), groups_of(optimizer, names), tensors, values)


def stand_in(parameter: Tensor) -> nn.Parameter:
    """Return a small parameter of zeros, like another in dtype, device, dimensions and sharding.

    Its sides differ, so that a state's sides tell which of the parameter's they follow, and every rank has some rows.
    """
    shards = 1
    if isinstance(parameter, DTensor):
        axes = [axis for axis, place in enumerate(parameter.placements) if isinstance(place, Shard)]
        shards = max([parameter.device_mesh.size(axis) for axis in axes], default=1)
    sides = (2 * max(shards, 2) - 1, *range(4, 4 + 2 * parameter.ndim, 2))[: parameter.ndim]
    return nn.Parameter(zeros((1,) * parameter.ndim if parameter.numel() == 1 else sides, parameter))


def zeros(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros of another shape, in a tensor's sharding and on its device."""
    dtype = like.dtype if dtype is None else dtype
    if not isinstance(like, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=like.device)
    size = torch.Size(shape)
    mine, _ = compute_local_shape_and_global_offset(size, like.device_mesh, like.placements)
    strides = torch.empty(size, device="meta").stride()
    local = torch.zeros(mine, dtype=dtype, device=like.to_local().device)
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=size, stride=strides)


def _grown(value: Tensor, small: torch.Size, parameter: Tensor) -> Tensor:
    """Return zeros of the shape that a stand-in's state has for the real parameter."""
    if value.shape == small and value.ndim:
        return torch.zeros_like(parameter, dtype=value.dtype)
    sides = dict(zip(small, parameter.shape, strict=True)) if small.numel() != 1 else {}
    return zeros([sides.get(side, side) for side in value.shape], value)


def _state_after_one_step(optimizer: Optimizer, group: Mapping[str, Any], small: nn.Parameter) -> State:
    small.grad = torch.zeros_like(small)
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # a user's hooks see real steps only
    twin.__dict__.pop("step", None)  # a learning rate scheduler binds the real optimizer's step here
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = [{**group, "params": [small]}]
    twin.step()
    return dict(twin.state[small])
