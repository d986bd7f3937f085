"""Measure how much rounding errors change a model's results, by perturbing each module's output by about as much.

The effect depends on depth, weights and the input, so that no fixed limit would do. The method is Monte Carlo
arithmetic (Parker, "Monte Carlo arithmetic", UCLA CSD-970002, 1997).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class _Perturb(torch.autograd.Function):
    """Perturb values in the forward pass and gradients in the backward pass, each by at most `relative_change`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, relative_change: float) -> Tensor:
        ctx.relative_change = relative_change
        return _moved(values, relative_change)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _moved(gradient, ctx.relative_change), None


def _moved(values: Tensor, relative_change: float) -> Tensor:
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return (wide * (1 + relative_change * (2 * torch.rand_like(wide) - 1))).to(values.dtype)


@contextmanager
def rounded_otherwise(model: nn.Module, relative_change: float) -> Iterator[None]:
    """Move what each module with parameters of its own returns, and the gradient of that, within the block.

    A backward pass belongs inside too: blocks that are recomputed call their modules again. Draws are torch's.

    Args:
        model: Sharded or not.
        relative_change: Largest relative change.
    """

    def moved(values: Tensor) -> Any:
        return _Perturb.apply(values, relative_change) if values.is_floating_point() else values  # type: ignore[no-untyped-call]

    def move(_: nn.Module, __: object, output: Any) -> Any:
        return tree_map_only(Tensor, moved, output)

    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    hooks = [module.register_forward_hook(move) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
