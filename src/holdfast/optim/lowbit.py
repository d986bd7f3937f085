"""Low-precision AdamW: moments quantised to 8 bits in torchao's class, and AdamW for weights stored in bfloat16.

*Quantised moments.* A moment is divided into blocks of 256 elements, each with its own scale: Dettmers et al.
(arXiv:2110.02861), section 2. Deviation: a tensor is quantised only if the rows of every rank consist of complete
blocks, so that all ranks keep the same class. The compiled update is an optional form (parallel/forms.py).

*bfloat16 weights.* A bfloat16 weight of 1.0 cannot move by 1e-3, which is less than half of its last digit and rounds
away. A compensation term stores what a step could not add, and adds it in the next step (Kahan 1965; for training:
Zamirai et al., arXiv:2010.06192, algorithm 3). Weight, two moments and compensation take 8 bytes per parameter, where
float32 AdamW takes 12. A second moment that decays by 1e-3 a step has the same problem: rounded to the nearest
bfloat16, it would never decay, and the largest gradient so far would reduce the update for good. Moments are therefore
rounded up or down in proportion to what is cut off, as in stochastic rounding (Gupta et al., arXiv:1502.02551). In
place of a random number, the rounding uses an additive recurrence that is a function of the step (Roberts 2018, "The
unreasonable effectiveness of quasirandom sequences"). The errors of n roundings then sum to O(log n), and the result
depends neither on a generator nor on the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.optim.wrapped import placed_like, shards_of, torchao_module
from holdfast.parallel.shards import local_part
from holdfast.types import host_value

SPREAD = (0.7548776662466927, 0.5698402909980532)
"""Increments of the two-dimensional recurrence, one for each moment: 1/x and 1/x^2, where x^3 = x + 1."""
_CUT = 2**16
"""Number of values of the 16 low bits of a float32, which bfloat16 drops."""


def round_evenly(average: Tensor, exact: Tensor, position: float) -> None:
    """Round `exact` into `average`: up where the fraction that is cut off, plus that of `position`, reaches 1.

    Args:
        average: Receives the result in its own dtype.
        exact: float32 tensor of the same shape.
        position: Term of a sequence whose fractional parts fill [0, 1) evenly.
    """
    if average.dtype is not torch.bfloat16:
        average.copy_(exact)
        return
    digits = (
        exact.view(torch.int32).add(int(position % 1 * _CUT)).bitwise_and_(-_CUT)
    )  # of the magnitude, at either sign
    average.copy_(digits.view(torch.float32))


class PerParameterAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101); a subclass says how a parameter is updated."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, which has a gradient."""
        raise NotImplementedError


class AdamWBF16(PerParameterAdamW):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on bfloat16 shards.

    The update is computed in float32 and added with compensation:

        u = -(lr * m_hat / (sqrt(v_hat) + eps) + lr * decay * w) + c
        w' = bf16(w + u),  c = bf16(u - (w' - w))

    State per parameter: step (float32 scalar), exp_avg, exp_avg_sq, compensation (as the weight).
    """

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, which has a gradient."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", "compensation"):
                state[name] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        weight, gradient = local_part(parameter), local_part(parameter.grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        state["step"] += 1
        step, (beta1, beta2) = float(host_value(state["step"], "steps of a parameter")), group["betas"]
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        round_evenly(first, mean, step * SPREAD[0])
        round_evenly(second, square, step * SPREAD[1])
        denominator = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        update = mean.div_(denominator).mul_(-group["lr"] / (1 - beta1**step))
        _add_compensated(weight, update, local_part(state["compensation"]), group["lr"] * group["weight_decay"])


def _add_compensated(weight: Tensor, update: Tensor, compensation: Tensor, decay: float) -> None:
    before = weight.float()
    update = update.add_(before, alpha=-decay).add_(compensation)
    weight.copy_(before + update)
    compensation.copy_(update.sub_(weight.float().sub_(before)))


_BLOCK = 256
"""Elements that share a scale."""
_SMALLEST_QUANTIZED = 4096
"""Number of elements below which a tensor's moments are not quantised, as in Dettmers et al."""

Moments = tuple[Tensor, Tensor]
"""The first and the second moment of a rank's shard."""
Update = Callable[[Tensor, Tensor, Moments, tuple[Tensor, ...], tuple[float, float], float], None]
"""A form of `update_shard`."""
StandIn = Callable[[Update], tuple[Tensor, ...]]
"""Random numbers with the shape of a shard, which a form updates; returns weight and moments."""


class AdamW8bit(PerParameterAdamW):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on shards, with moments of 8 bits: 2.03 bytes for both.

    State per parameter: step (float32 scalar), exp_avg, exp_avg_sq (quantised, or in the parameter's dtype where blocks
    do not fit). The update uses the moments before they are quantised again.

    Raises:
        ConfigError: torchao is not installed.
    """

    form: Update

    def __init__(self, params: Iterable[Any], **hyper_parameters: Any) -> None:
        state_class = torchao_module("torchao.optim.subclass_8bit", "optim.kind: adamw_8bit").OptimState8bit
        self._zeros = state_class.zeros
        self.form = update_shard
        super().__init__(params, **hyper_parameters)

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, which has a gradient."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = self._moment(parameter, signed=True)
            state["exp_avg_sq"] = self._moment(parameter, signed=False)
        assert parameter.grad is not None
        state["step"] += 1
        step = float(host_value(state["step"], "steps of a parameter"))
        moments = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad.detach())
        self.form(weight, gradient, moments, _factors(weight, group, step), group["betas"], group["eps"])

    def stand_ins(self) -> Iterator[tuple[Callable[[], StandIn], int]]:
        """Yield what makes a stand-in for each shape that this rank updates, and the number of its parameters."""
        alike: dict[tuple[Any, ...], list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                key = (parameter.shape, parameter.dtype, group["betas"], group["eps"])
                alike.setdefault(key, []).append((parameter, group))
        for several in alike.values():
            if local_part(several[0][0].detach()).numel():
                yield partial(self._stand_in, *several[0]), len(several)

    def _stand_in(self, parameter: Tensor, group: dict[str, Any]) -> StandIn:
        local = local_part(parameter.detach())
        generator = torch.Generator(local.device).manual_seed(0)
        weight, first, gradient = (
            torch.randn(local.shape, generator=generator, dtype=local.dtype, device=local.device) for _ in range(3)
        )
        moments = _local(self._moment(parameter, signed=True)), _local(self._moment(parameter, signed=False))

        @torch.no_grad()
        def update(form: Update, gradient: Tensor = gradient, step: int = 2) -> tuple[Tensor, ...]:
            form(weight, gradient, moments, _factors(weight, group, step), group["betas"], group["eps"])
            return weight, *moments

        update(update_shard, first, 1)  # from moments of zero, which say nothing of their tables
        return update

    def _moment(self, parameter: Tensor, *, signed: bool) -> Tensor:
        local = local_part(parameter.detach())
        moment = (
            self._zeros(local.shape, signed, _BLOCK, local.device, dtype=parameter.dtype)
            if _fits(parameter)
            else torch.zeros_like(local)
        )
        return placed_like(parameter, moment, parameter.shape)


def _factors(weight: Tensor, group: Mapping[str, Any], step: float) -> tuple[Tensor, ...]:
    """Return decay, rate and correction of a step, as tensors: an update would be compiled again for other numbers."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    factors = [1 - rate * group["weight_decay"], rate / (1 - beta1**step), math.sqrt(1 - beta2**step)]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.tensor(factors, dtype=dtype).unbind()


def update_shard(  # noqa: PLR0913, PLR0917 - what a compiler sees as inputs
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    factors: tuple[Tensor, ...],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update a shard's weights and moments in place."""
    (first, second), (decay, rate, correction) = moments, factors
    wide = torch.promote_types(weight.dtype, torch.float32)
    gradient = gradient.to(wide)
    mean = numbers_of(first, wide).lerp(gradient, 1 - betas[0])
    square = numbers_of(second, wide).lerp(gradient.square(), 1 - betas[1])
    first.copy_(mean)
    second.copy_(square)
    weight.copy_(weight.to(wide) * decay - rate * mean / (square.sqrt() / correction + eps))


def numbers_of(moment: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a moment; `to` alone would only change the dtype that a quantised tensor reports."""
    return (moment.dequantize() if hasattr(moment, "__tensor_flatten__") else moment).to(dtype)


def _local(moment: Tensor) -> Tensor:
    """Return this rank's shard; `to_local` would rebuild a quantised one, and in-place updates would be lost."""
    # `_local_tensor` is DTensor's private field for the shard that this rank stores.
    return moment._local_tensor if isinstance(moment, DTensor) else moment


def _fits(parameter: Tensor) -> bool:
    """Return whether a parameter is large enough to quantise and every rank's rows consist of complete blocks."""
    if parameter.numel() < _SMALLEST_QUANTIZED or not parameter.ndim:
        return False
    shards = shards_of(parameter)
    most = -(-parameter.shape[0] // shards)
    least = parameter.shape[0] - (shards - 1) * most
    row = parameter.numel() // parameter.shape[0]
    return least > 0 and all(rows * row % _BLOCK == 0 for rows in (most, least))
