"""Gradients of a head that are known before the backward pass: added up wide, narrowed when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PRODUCT_BYTES = 2**25
"""Of a product that is to be added to a wider sum: as much of the vocabulary at once as makes so many."""


def add_product(total: Tensor, by_logits: Tensor, states: Tensor) -> None:
    """Add `by_logits.T @ states` to a sum in place.

    A product in another dtype than the sum's needs memory of its own; it is formed in slices of the vocabulary.

    Args:
        total: [V, H]
        by_logits: [n, V]
        states: [n, H], in the dtype of `by_logits`.
    """
    if total.dtype == states.dtype:
        total.addmm_(by_logits.t(), states)
        return
    rows = max(1, _PRODUCT_BYTES // (states.shape[1] * states.element_size()))
    for start in range(0, total.shape[0], rows):
        part = slice(start, start + rows)
        total[part] += by_logits[:, part].t() @ states


class WithGradients(torch.autograd.Function):
    """A loss whose gradients by hidden states, weight and bias are known already, maybe in a wider dtype than theirs.

    They are narrowed in the backward pass: until then a head that is split over ranks is gathered.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd's form
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: Sequence[Tensor | None],
    ) -> Tensor:
        """Return the loss, and note its gradients."""
        ctx.parts = list(gradients)
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Any, ...]:
        """Return the gradients that were noted, times the loss's own."""
        return (*narrowed(ctx.parts, ctx.dtypes, by_loss), None, None)


def narrowed(
    parts: list[Tensor | None], dtypes: Sequence[torch.dtype | None], factor: Tensor | None = None
) -> list[Tensor | None]:
    """Return gradients in the dtypes of what they belong to, maybe times a factor; `parts` is emptied as they are."""
    results: list[Tensor | None] = []
    for dtype in dtypes:
        part = parts.pop(0)
        if part is None or dtype is None:
            results.append(None)
            continue
        part = part.to(dtype)  # the wide one is freed before the next is narrowed
        results.append(part if factor is None else part.mul_(factor.to(dtype)))
    return results
