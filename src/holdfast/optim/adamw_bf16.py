"""AdamW for weights stored in bfloat16, with Kahan compensation.

A bfloat16 weight of 1.0 cannot move by 1e-3: the step is below half its last digit and rounds away. The compensation
term keeps what each step could not add and offers it again with the next one (Kahan 1965; for training: Zamirai et al.,
arXiv:2010.06192, algorithm 3). Weight, two moments and compensation take 8 bytes per parameter, float32 AdamW takes 12.

A moment that decays by 1e-3 a step has the same trouble: rounded to the nearest bfloat16, it never decays, and the
largest gradient that there was holds the rate down for good. Moments are rounded evenly instead (`optim/rounding.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.optim.per_parameter import PerParameterAdamW
from holdfast.optim.rounding import SPREAD, round_evenly
from holdfast.parallel.shards import local_part


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
