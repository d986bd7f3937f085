"""A model under FSDP1 as plain modules of DTensors: what can be saved and loaded as any other is.

FSDP1 keeps parameters in flat ones of its own; its sharded state is by name. It is laid into empty modules of the same
names, with an optimizer of the same class over them, and after a load it is handed back to FSDP1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from holdfast.integrations.saves import UnsuitableTrainer
from holdfast.optim.state_template import twin_of

_WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class StandIn:
    """A model and its optimizer, by name."""

    model: nn.Module
    optimizer: Optimizer | None
    names: dict[str, Tensor]
    """The tensors of the model's state."""


def stand_in(model: nn.Module, optimizer: Optimizer | None) -> StandIn:
    """Return modules with the shards of a model, and an optimizer with those of its state; all ranks call this.

    Raises:
        UnsuitableTrainer: FSDP1 was given no mesh, without which its shards are of a class that cannot be saved.
    """
    trained = {name.replace(_WRAPPER, "") for name, value in model.named_parameters() if value.requires_grad}
    frozen = {name.replace(_WRAPPER, "") for name, value in model.named_parameters() if not value.requires_grad}
    with _sharded(model):
        state: dict[str, Tensor] = model.state_dict()
        optimizer_state = None if optimizer is None else FullyShardedDataParallel.optim_state_dict(model, optimizer)
    odd = [name for name, value in state.items() if type(value).__name__ == "ShardedTensor"]
    if odd:
        raise UnsuitableTrainer(
            f"FSDP1 gives {odd[0]} as a ShardedTensor, since it was made without a mesh. Give it device_mesh, or use "
            "FSDP2."
        )
    root = nn.Module()
    parameters: dict[str, nn.Parameter] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:  # noqa: SLF001 - names of layers may be those of methods
                place.add_module(part, nn.Module())
            place = place._modules[part]  # type: ignore[assignment]  # noqa: SLF001 - as above
        if name in trained | frozen:
            parameters[name] = nn.Parameter(value, requires_grad=name in trained)
            place.register_parameter(last, parameters[name])
        else:
            place.register_buffer(last, value)
    return StandIn(root, None if optimizer is None else _optimizer(optimizer, optimizer_state or {}, parameters), state)


def _optimizer(optimizer: Optimizer, state: dict[str, Any], parameters: dict[str, nn.Parameter]) -> Optimizer:
    groups = [
        {**group, "params": [parameters[name] for name in saved["params"] if parameters[name].requires_grad]}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    twin = twin_of(optimizer, groups)
    for name, slots in state["state"].items():
        if slots:
            twin.state[parameters[name]] = dict(slots)
    return twin


def hand_back(model: nn.Module, optimizer: Optimizer | None, loaded: StandIn) -> None:
    """Give FSDP1 what was loaded; all ranks call this together."""
    names = {id(value): name for name, value in loaded.model.named_parameters()}
    with _sharded(model):
        model.load_state_dict(loaded.model.state_dict())
        if optimizer is None or loaded.optimizer is None:
            return
        groups = [
            {**group, "params": [names[id(value)] for value in group["params"]]}
            for group in loaded.optimizer.param_groups
        ]
        state = {names[id(value)]: dict(slots) for value, slots in loaded.optimizer.state.items()}
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, {"state": state, "param_groups": groups}
        )
    optimizer.load_state_dict(flat)


@contextmanager
def _sharded(model: nn.Module) -> Iterator[None]:
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield
