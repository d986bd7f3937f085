"""Muon for matrices, AdamW for everything else, in one optimizer with one state.

Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; the scale of updates with which both
algorithms share a learning rate is from Liu et al. (arXiv:2502.16982), section 2.2.

An update is orthogonalised as a full matrix: one matrix at a time is gathered, and every rank keeps its rows of the
result, so that the number of ranks does not change it. A parameter of fused experts [experts, out, in] is a batch of
matrices, of which each shard holds complete ones. LoRA factors of all experts that are stored in one matrix are
gathered and split by expert (`Stack`).

Deviations: the iteration runs in float32 if configured so, and in float64 on float64 weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.parallel.shards import local_part, local_rows
from holdfast.parallel.stream import full_tensor
from holdfast.types import host_value

MUON, ADAMW = "muon", "adamw"
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: singular values in (0, 1] end between about 0.7 and 1.2 after five steps."""
_SMALL = 1e-7


class Stack(NamedTuple):
    """The layout of one parameter that holds a matrix for each expert."""

    experts: int
    by_columns: bool
    """True for [rows, columns * experts], with the expert as the fastest index; False for [experts * rows, columns]."""

    def apart(self, stacked: Tensor) -> Tensor:
        """Return [experts, rows, columns]."""
        if self.by_columns:
            return stacked.reshape(stacked.shape[0], -1, self.experts).permute(2, 0, 1)
        return stacked.reshape(self.experts, -1, stacked.shape[-1])

    def together(self, matrices: Tensor) -> Tensor:
        """Undo `apart`."""
        if self.by_columns:
            return matrices.permute(1, 2, 0).reshape(matrices.shape[1], -1)
        return matrices.reshape(-1, matrices.shape[-1])


class Muon(Optimizer):
    """Muon for param groups with `algorithm: muon`, AdamW for those with `algorithm: adamw`.

    State, sharded like its parameter: momentum_buffer for Muon; step (float32, on the host), exp_avg and exp_avg_sq for
    AdamW. `stacks` names the parameters that hold several matrices in one.
    """

    def __init__(  # noqa: PLR0913 - hyper-parameters of two algorithms
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        scale: str = "adamw_rms",
        iterate_in: torch.dtype = torch.bfloat16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stacks: Mapping[Tensor, Stack] | None = None,
    ) -> None:
        self._stacks = dict(stacks or {})
        super().__init__(
            params,
            {
                "lr": lr,
                "algorithm": MUON,
                "momentum": momentum,
                "nesterov": nesterov,
                "iterations": iterations,
                "scale": scale,
                "iterate_in": iterate_in,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; all ranks call this together."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            update = self._orthogonal if group["algorithm"] == MUON else self._adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, group)
        return loss

    def _orthogonal(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, gradient = state["momentum_buffer"], parameter.grad
        local_part(buffer).lerp_(local_part(gradient), 1 - group["momentum"])
        ahead = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        dtype = parameter.dtype if parameter.dtype == torch.float64 else group["iterate_in"]
        shape, stack = parameter.shape[-2:], self._stacks.get(parameter)
        if stack is not None:
            matrices = stack.apart(full_tensor(ahead).to(dtype))
            shape = matrices.shape[-2:]
            update = stack.together(orthogonalised(matrices, group["iterations"]))[local_rows(parameter)]
        elif parameter.ndim == 2:
            orthogonal = orthogonalised(full_tensor(ahead).to(dtype), group["iterations"])
            update = orthogonal[local_rows(parameter)]
        else:
            update = orthogonalised(local_part(ahead).to(dtype), group["iterations"])
        weight = local_part(parameter)
        rate = group["lr"] * scale_of(group["scale"], *shape)
        weight.sub_(update.to(device=weight.device, dtype=weight.dtype), alpha=rate)

    def _adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, gradient = float(host_value(state["step"], "steps of a parameter")), local_part(parameter.grad)
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.div(1 - beta2**step).sqrt_().add_(group["eps"])
        local_part(parameter).addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Return about U V^T of matrices U S V^T [..., rows, columns], by Newton-Schulz steps on the shorter side."""
    rows, columns = matrices.shape[-2:]
    if not matrices.numel():
        return matrices
    result: Tensor = matrices.mT if rows > columns else matrices
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALL)
    first, second, third = _QUINTIC
    for _ in range(iterations):
        gram = result @ result.mT
        result = first * result + (second * gram + third * gram @ gram) @ result
    return result.mT if rows > columns else result


def scale_of(kind: str, rows: int, columns: int) -> float:
    """Return the factor of an orthogonal update of a [rows, columns] matrix.

    With `adamw_rms` its root mean square becomes 0.2, about that of AdamW's updates; otherwise the factor is
    sqrt(max(1, rows / columns)).
    """
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "adamw_rms" else math.sqrt(max(1.0, rows / columns))
