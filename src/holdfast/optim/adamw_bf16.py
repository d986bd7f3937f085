"""AdamW for weights stored in bfloat16, with Kahan compensation.

A bfloat16 weight of 1.0 cannot move by 1e-3: the step is below half its last digit and rounds away. The compensation
term keeps what each step could not add and offers it again with the next one (Kahan 1965; for training: Zamirai et al.,
arXiv:2010.06192, algorithm 3). Weight, two moments and compensation take 8 bytes per parameter, float32 AdamW takes 12.

A moment that decays by 1e-3 a step has the same trouble: rounded to the nearest bfloat16, it never decays, and the
largest gradient that there was holds the rate down for good. Moments are rounded up as often as down instead, in
proportion to what is left over, as stochastic rounding does (Gupta et al., arXiv:1502.02551), but by an additive
recurrence that is a function of the step (Roberts 2018, "The unreasonable effectiveness of quasirandom sequences"): the
errors of n steps cancel but for O(log n), and nothing depends on a generator or on how tensors are sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.optim.per_parameter import PerParameterAdamW
from holdfast.parallel.materialise import local_part

_PLACES = {"exp_avg": 0.7548776662466927, "exp_avg_sq": 0.5698402909980532}
"""Steps of the recurrence in two dimensions: 1/x and 1/x^2, where x^3 = x + 1."""
_CUT = 2**16
"""Values of the digits that float32 has and bfloat16 has not."""


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
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        store(first, mean, step * _PLACES["exp_avg"])
        store(second, square, step * _PLACES["exp_avg_sq"])
        denominator = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        update = mean.div_(denominator).mul_(-group["lr"] / (1 - beta1**step))
        _add_compensated(weight, update, local_part(state["compensation"]), group["lr"] * group["weight_decay"])


def store(moment: Tensor, exact: Tensor, place: float) -> None:
    """Round to what a moment is kept in: up where the part that is cut off, plus the fraction of `place`, reaches 1.

    Args:
        moment: Overwritten.
        exact: float32, of the same shape.
        place: Of this rounding in a sequence whose fractions fill [0, 1) evenly.
    """
    if moment.dtype is not torch.bfloat16:
        moment.copy_(exact)
        return
    digits = exact.view(torch.int32).add(int(place % 1 * _CUT)).bitwise_and_(-_CUT)  # of the magnitude, at either sign
    moment.copy_(digits.view(torch.float32))


def _add_compensated(weight: Tensor, update: Tensor, compensation: Tensor, decay: float) -> None:
    before = weight.float()
    update = update.add_(before, alpha=-decay).add_(compensation)
    weight.copy_(before + update)
    compensation.copy_(update.sub_(weight.float().sub_(before)))
