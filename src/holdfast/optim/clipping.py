"""Clip by the global gradient norm, and decide whether an update is made, on the host or on the device.

Where the optimizer takes both as tensors, nothing waits between the backward pass and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.parallel.shards import local_part


def takes_tensors(optimizer: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Return whether an optimizer takes the divisor of its gradients and its decision as tensors of a device.

    Fused AdamW does. It takes the divisor in float32, which is too coarse for float64 weights; weights of 16 bits and
    those in host memory are clipped on the host.
    """
    return (
        type(optimizer) is torch.optim.AdamW
        and all(group["fused"] for group in optimizer.param_groups)
        and all(value.dtype == torch.float32 and local_part(value).device == device for value in parameters)
    )


def step_unless_skipped(optimizer: Optimizer, norm: Tensor, largest: float | None) -> Tensor:
    """Make the step of an optimizer that takes tensors, with clipped gradients; the host does not learn whether.

    No step is made where the norm is zero or not finite. The optimizer then counts none either.

    Returns:
        [] bool, whether the step was skipped.

    Args:
        optimizer: See `takes_tensors`.
        norm: [] float64, of all gradients.
        largest: Norm to which larger ones are scaled down; None: no limit.
    """
    divisor = torch.ones_like(norm) if largest is None else (norm / largest).clamp(min=1.0)
    skipped = (norm == 0.0) | ~norm.isfinite()
    # The names are those by which torch's GradScaler hands them to an optimizer.
    optimizer.grad_scale, optimizer.found_inf = divisor.float(), skipped.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return skipped


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)


def clip_factor(norm: float, largest: float | None) -> float:
    """Return the factor that scales a norm to `largest` (Pascanu et al., arXiv:1211.5063); 1 if it is smaller."""
    return 1.0 if largest is None or norm <= largest else largest / norm
