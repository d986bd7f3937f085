"""Clipping and skipping on the device: what the host does, without asking it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.optim.clipping import clip_factor, scale, step_unless_skipped, takes_tensors

CLIP = 0.7


def fused(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def gradients_of(step: int, size: float, model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(value.shape, generator=generator) * size for value in model.parameters()]


def norm_of(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.double().norm() for gradient in gradients]).norm()


def give(model: nn.Module, gradients: list[Tensor]) -> None:
    for value, gradient in zip(model.parameters(), gradients, strict=True):
        value.grad = gradient.clone()


def bits(model: nn.Module, optimizer: torch.optim.AdamW) -> list[Any]:
    state = [each for value in model.parameters() for _, each in sorted(optimizer.state.get(value, {}).items())]
    return [tensor.detach().clone().tolist() for tensor in (*model.parameters(), *state)]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("largest", [CLIP, None])
def test_clipping_is_dividing_gradients_by_the_norm_over_the_limit_bit_for_bit(
    size: float, largest: float | None
) -> None:
    (one, ours), (other, plain) = fused(), fused()

    for step in range(5):
        gradients = gradients_of(step, size, one)
        norm = norm_of(gradients)
        give(one, gradients)
        step_unless_skipped(ours, norm, largest)
        divisor = 1.0 if largest is None else max(1.0, float(norm) / largest)
        give(other, [gradient / torch.tensor(divisor, dtype=torch.float32) for gradient in gradients])
        plain.step()

    assert bits(one, ours) == bits(other, plain)
    assert not hasattr(ours, "grad_scale")


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_clipping_on_the_device_is_within_rounding_of_clipping_on_the_host(size: float) -> None:
    (one, ours), (other, plain) = fused(), fused()

    for step in range(5):
        gradients = gradients_of(step, size, one)
        give(one, gradients)
        step_unless_skipped(ours, norm_of(gradients), CLIP)
        give(other, gradients)
        scale([value.grad for value in other.parameters()], clip_factor(float(norm_of(gradients)), CLIP))
        plain.step()

    for value, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("steps", [0, 3])
def test_no_update_is_made_and_none_is_counted_where_the_norm_is_zero_or_no_number(norm: float, steps: int) -> None:
    model, optimizer = fused()
    for step in range(steps):
        give(model, gradients_of(step, 1.0, model))
        step_unless_skipped(optimizer, norm_of(gradients_of(step, 1.0, model)), CLIP)
    straight, expected = copy.deepcopy((model, optimizer))
    before = bits(model, optimizer) if steps else [value.detach().clone().tolist() for value in model.parameters()]

    give(model, [gradient * norm for gradient in gradients_of(9, 1.0, model)])
    step_unless_skipped(optimizer, torch.tensor(norm, dtype=torch.float64), CLIP)

    assert bits(model, optimizer)[: len(before)] == before
    for which, how in ((model, optimizer), (straight, expected)):
        give(which, gradients_of(10, 1.0, which))
        step_unless_skipped(how, norm_of(gradients_of(10, 1.0, which)), CLIP)
    assert bits(model, optimizer) == bits(straight, expected), "what follows does not know of the one that was skipped"


def test_optimizers_that_take_no_tensors_are_clipped_on_the_host() -> None:
    cpu = torch.device("cpu")
    model, optimizer = fused()
    double, of_double = fused(dtype=torch.float64)

    def taken(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device = cpu) -> bool:
        return takes_tensors(optimizer, list(model.parameters()), device)

    assert taken(optimizer, model)
    assert not taken(of_double, double)
    assert not taken(optimizer, model, torch.device("cuda"))
    assert not taken(torch.optim.AdamW(model.parameters(), fused=False), model)
    assert not taken(torch.optim.SGD(model.parameters(), lr=0.1), model)
