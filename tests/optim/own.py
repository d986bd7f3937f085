"""Optimizers as users write them, good and bad; each keeps something in its own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer


class Momentum(Optimizer):
    """Gradient descent with momentum; what else a step does is a subclass's."""

    def __init__(self, params: Any, lr: float = 0.1, share: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                self.update(parameter, self.state[parameter], group)

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].mul_(group["share"]).add_(parameter.grad)
        parameter.sub_(group["lr"] * state["average"])


class RowNorms(Momentum):
    """Divides by a running root of each row's mean square: state of a row's size, sharded like the rows."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        squares = parameter.grad.square()
        rows = squares.mean(-1, keepdim=True) if parameter.ndim > 1 else squares
        state["rows"] = rows if "rows" not in state else state["rows"].mul(group["share"]).add(rows)
        parameter.sub_(group["lr"] * parameter.grad / state["rows"].sqrt())


class Factored(Momentum):
    """Adafactor's two factors (arXiv:1804.04235), in operations that shards have."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        squares = parameter.grad.square() + 1e-6
        if parameter.ndim < 2:
            state["square"] = state.get("square", 0.0) * group["share"] + squares
            parameter.sub_(group["lr"] * parameter.grad / state["square"].sqrt())
            return
        columns = squares.mean(-2)
        if isinstance(columns, DTensor):
            columns = columns.redistribute(placements=[Replicate()] * columns.device_mesh.ndim)
        state["rows"] = state.get("rows", 0.0) * group["share"] + squares.mean(-1)
        state["columns"] = state.get("columns", 0.0) * group["share"] + columns
        scale = state["rows"].unsqueeze(-1) * state["columns"].unsqueeze(-2) / state["rows"].mean(-1)[..., None, None]
        if isinstance(scale, DTensor):
            scale = scale.redistribute(placements=[Shard(0)] * scale.device_mesh.ndim)
        parameter.sub_(group["lr"] * parameter.grad / scale.sqrt())


class CountsBeside(Momentum):
    """Forgets how far it came: the count is in no checkpoint."""

    count = 0

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count += 1
        parameter.sub_(group["lr"] / self.count * parameter.grad)


class DecaysBeside(Momentum):
    """Lets its rate decay by a hundred-thousandth an update, counted in no checkpoint: far below rounding of sums."""

    count = 0

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count += 1
        parameter.sub_(group["lr"] * (1 - 1e-5 * self.count) * parameter.grad)


class KeepsAnObject(Momentum):
    """Keeps what has no written form."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        state["history"] = object()


class NormOfAShard(Momentum):
    """Divides by the norm of the shard, which is not the norm of the parameter."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        parameter.sub_(group["lr"] / max(float(local.norm()), 1e-9) * parameter.grad)


class CountsOnlyItsOwn(Momentum):
    """Moves as it should, and keeps a number that each rank has of its own."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        assert parameter.grad is not None
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        state["largest"] = float(local.abs().max()) if local.numel() else 0.0


class LocalBuffer(Momentum):
    """Keeps its shard as a plain tensor, which nobody can put together again."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        sharded = isinstance(parameter.grad, DTensor)
        gradient = parameter.grad.to_local() if sharded else parameter.grad
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        state["average"] = state.get("average", 0.0) * group["share"] + gradient
        weight.sub_(group["lr"] * state["average"])


class NeedsAClosure(Momentum):
    """Evaluates the loss in its step."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class WithoutRate(Optimizer):
    """Has a rate of its own."""

    def __init__(self, params: Any, speed: float = 0.1) -> None:
        super().__init__(params, {"speed": speed})


def not_a_class() -> None:
    """Is a function."""
