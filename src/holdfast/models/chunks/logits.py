"""From hidden states to logits, and the product that leads back to the head's gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.models.layers.family import HeadSpec

CACHE_ELEMENTS = 65_536
"""Logits swept at once on the CPU: a block that stays in the second-level cache between two passes over it."""

_PRODUCT_BYTES = 2**25
"""Of a product that is to be added to a wider sum: as much of the vocabulary at once as makes so many."""


class HeadWeights(NamedTuple):
    """The head's parameters, as they are inside the sharded root's forward."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""


def chunk_tokens(spec: HeadSpec, vocabulary: int, device: torch.device) -> int:
    """Return how many tokens are scored at once, where each takes one row of `vocabulary` logits."""
    if spec.chunk_tokens is not None:
        return spec.chunk_tokens
    room = 2**25 if device.type == "cpu" else 2**29
    return max(128, min(4096, room // (4 * vocabulary)))


def product_dtype(spec: HeadSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the matrix product, given that of hidden states."""
    return torch.float32 if spec.float32_product and dtype == torch.bfloat16 else dtype


def widens(spec: HeadSpec, *factors: Tensor) -> bool:
    """Return whether the product is in float32, and its factors stay in bfloat16: a GPU needs no wider copies."""
    on_gpu = all(factor.device.type == "cuda" and factor.dtype == torch.bfloat16 for factor in factors)
    return spec.float32_product and on_gpu and torch.version.hip is None


def factors_of(hidden: Tensor, head: HeadWeights, spec: HeadSpec) -> tuple[Tensor, HeadWeights]:
    """Return hidden states and head, without a graph, in the dtype in which they are multiplied."""
    dtype = hidden.dtype if widens(spec, hidden, head.weight) else product_dtype(spec, hidden.dtype)
    bias = None if head.bias is None else head.bias.detach().to(dtype)
    return hidden.detach().to(dtype), HeadWeights(head.weight.detach().to(dtype), bias)


def product_of(states: Tensor, weight: Tensor, spec: HeadSpec, out: Tensor | None = None) -> Tensor:
    """Return `states @ weight.T`, [n, V], which is not differentiable where it widens, maybe in a buffer."""
    if widens(spec, states, weight):
        return torch.mm(states, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(states, weight.t(), out=out)


def logits_of(
    hidden: Tensor, head: HeadWeights, spec: HeadSpec, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return logits [n, V] of [n, H], in float32 or better, and the derivative of their soft cap, None without one."""
    return scaled(product_of(hidden, head.weight, spec), head.bias, spec, temperature)


def scaled(product: Tensor, bias: Tensor | None, spec: HeadSpec, temperature: float) -> tuple[Tensor, Tensor | None]:
    """Return what `logits_of` does, given the matrix product; one in float32 or better is overwritten."""
    logits = product.float() if product.dtype in {torch.bfloat16, torch.float16} else product
    if bias is not None:
        logits += bias
    slope = None
    if spec.softcap is not None:
        logits = logits.mul_(spec.scale / spec.softcap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(spec.softcap / temperature)
    elif spec.scale != temperature:
        logits.mul_(spec.scale / temperature)
    return logits, slope


def add_product(total: Tensor | None, by_logits: Tensor, states: Tensor) -> Tensor:
    """Return a sum [V, H] with `by_logits.T @ states`, of [n, V] and [n, H] of one dtype, added in place.

    A product in another dtype than the sum's needs memory of its own; it is formed in slices of the vocabulary.

    Args:
        total: In float32 or better; None for a sum that begins.
        by_logits, states: The factors.
    """
    if total is None:
        wide = torch.promote_types(states.dtype, torch.float32)
        total = states.new_zeros((by_logits.shape[1], states.shape[1]), dtype=wide)
    if total.dtype == states.dtype:
        return total.addmm_(by_logits.t(), states)
    rows = max(1, _PRODUCT_BYTES // (states.shape[1] * states.element_size()))
    for start in range(0, total.shape[0], rows):
        part = slice(start, start + rows)
        total[part] += by_logits[:, part].t() @ states
    return total


def count_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of logits [n, V] and how many equal it, [n] each."""
    maximum = logits.amax(-1)
    # The exponentials would not do: those of two logits that are close enough are both 1.
    return maximum, (logits == maximum[:, None]).count_nonzero(-1)


def accuracy_of(logits: Tensor, maximum: Tensor, largest: Tensor) -> Tensor:
    """Return [n]: 1/n for a logit among n largest ones, 0 for any other, from what `count_largest` returns."""
    return torch.where(logits >= maximum, 1.0 / largest, 0.0)
