"""The global gradient norm over shards, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.parallel.shards import local_part


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of every gradient that exists."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def give_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters that the backward pass did not reach a zero gradient, as sharded units do when they reduce.

    Without it an unused weight would decay on two ranks and stay as it is on one. A unit that no rank ran, such as a
    vision tower in an update without images, does not reduce at all.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's gradients, a float64 scalar.

    Norms per tensor are taken in float32 or better; their squares are added in float64, so that many small tensors are
    not lost beside a large one.
    """
    parts = [part for part in gradients if part.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = [part if part.dtype == torch.float64 else part.float() for part in parts]
    norms = torch._foreach_norm(wide)
    return torch.stack([norm.to(device=device, dtype=torch.float64) for norm in norms]).square().sum()


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)


def clip_factor(norm: float, largest: float | None) -> float:
    """Return what brings a norm down to `largest` (Pascanu et al., arXiv:1211.5063), or 1."""
    return 1.0 if largest is None or norm <= largest else largest / norm
