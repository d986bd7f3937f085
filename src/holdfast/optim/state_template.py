"""Predict an optimizer's state (keys, shapes, dtypes, classes, sharding) from one step of a copy of it on zeros."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from holdfast.optim.randomness import private_randomness, with_own_generators
from holdfast.optim.state import CollectedState, OptimizerState, groups_of, names_of, state_device
from holdfast.parallel.shards import local_part, odd_class

_State = dict[str, Any]


def inert_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the state that the optimizer will have after its first step, filled with zeros; nothing live changes.

    A copy with its class and hyper-parameters takes one step on a zero parameter of each shape, dtype and sharding,
    since the state that an optimizer keeps may depend on the size of a parameter. All ranks call this together.
    """
    names = names_of(optimizer, parameters)
    collected = CollectedState(optimizer)
    for group in optimizer.param_groups:
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            kind = (parameter.shape, parameter.dtype, getattr(parameter, "placements", None))
            alike.setdefault(kind, []).append(parameter)
        for parameters_of_kind in alike.values():
            first = parameters_of_kind[0]
            blank = nn.Parameter(zeros(first.shape, first, state_device(optimizer, first)))
            learned = _state_after_one_step(optimizer, group, blank)
            for parameter in parameters_of_kind:
                for key, value in learned.items():
                    collected.add(names[id(parameter)], str(key), _as_zeros(value), parameter)
    return collected.state(groups_of(optimizer, names))


def _as_zeros(value: Any) -> Any:
    """Return zeros in place of a plain tensor; quantised ones stay as zero gradients made them."""
    return torch.zeros_like(value) if isinstance(value, Tensor) and odd_class(value) is None else value


def zeros(shape: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros of another shape, in a tensor's dtype and sharding, on its device unless another one is given."""
    device = device or local_part(like.detach()).device
    if not isinstance(like, DTensor):
        return torch.zeros(tuple(shape), dtype=like.dtype, device=device)
    size = torch.Size(shape)
    # Torch's private function and not a formula of ours: it knows how uneven rows fall on ranks, on every mesh.
    local_shape, _ = compute_local_shape_and_global_offset(size, like.device_mesh, like.placements)
    strides = torch.empty(size, device="meta").stride()
    local = torch.zeros(local_shape, dtype=like.dtype, device=device)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(size, strides, like.dtype))
    # `from_local` would move host memory to the mesh's device.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class with copied attributes, but with other param groups and without state."""
    # Without __init__, whose arguments are not known for a class of the user's.
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(with_own_generators(vars(optimizer)))
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()  # a user's hooks see real steps only
    twin.__dict__.pop("step", None)  # a learning rate scheduler binds the real optimizer's step here
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = groups
    return twin


def _state_after_one_step(optimizer: Optimizer, group: Mapping[str, Any], small: nn.Parameter) -> _State:
    small.grad = torch.zeros_like(small)
    twin = twin_of(optimizer, [{**group, "params": [small]}])
    with private_randomness():
        twin.step()
    return dict(twin.state[small])
