"""What a module gives and gets back is moved by a part of it, and nothing stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.models.check.rounding import rounded_otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_move_by_a_part_and_only_within_the_block(dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # in bfloat16 the gradients of some weights are rounded by more than what is compared
    linear: Any = nn.Linear(64, 64, dtype=dtype)
    model = nn.Sequential(linear, nn.ReLU())
    rows = torch.randn(256, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))
    before = model(rows)
    before.sum().backward()
    gradient = linear.bias.grad.clone()
    model.zero_grad()
    part = 2.0**-4

    with rounded_otherwise(model, part):
        within = model(rows)
        within.sum().backward()

    moved = ((within - before) / before)[before != 0].detach().double()
    assert 0.9 * part < moved.abs().max() < 1.1 * part
    assert float(moved.abs().mean()) == pytest.approx(part / 2, rel=0.05)
    assert abs(moved.mean()) < 0.05 * part
    change = (linear.bias.grad - gradient).double().abs().mean()
    # A sum of n draws, uniform in +-part, is part * sqrt(n / 3) at root mean square; its mean size is sqrt(2 / pi) of
    # that.
    active = (before != 0).sum(0).double().mean()
    assert float(change) == pytest.approx(part * float((active / 3 * 2 / torch.pi).sqrt()), rel=0.35)
    assert torch.equal(model(rows), before)
