"""Rounding to bfloat16 whose errors cancel over time, for averages that move by less than half a last digit.

A number is rounded up as often as down, in proportion to what is cut off, as stochastic rounding does (Gupta et al.,
arXiv:1502.02551), but by an additive recurrence that is a function of the step (Roberts 2018, "The unreasonable
effectiveness of quasirandom sequences"): the errors of n roundings cancel but for O(log n), and nothing depends on a
generator, or on how tensors are sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD = (0.7548776662466927, 0.5698402909980532)
"""Steps of the recurrence in two dimensions, for two averages: 1/x and 1/x^2, where x^3 = x + 1."""
_CUT = 2**16
"""Values of the digits that float32 has and bfloat16 has not."""


def round_evenly(average: Tensor, exact: Tensor, place: float) -> None:
    """Round to the dtype of an average: up where the part that is cut off, plus the fraction of `place`, reaches 1.

    Args:
        average: Overwritten.
        exact: float32, of the same shape.
        place: Of this rounding in a sequence whose fractions fill [0, 1) evenly.
    """
    if average.dtype is not torch.bfloat16:
        average.copy_(exact)
        return
    digits = exact.view(torch.int32).add(int(place % 1 * _CUT)).bitwise_and_(-_CUT)  # of the magnitude, at either sign
    average.copy_(digits.view(torch.float32))
