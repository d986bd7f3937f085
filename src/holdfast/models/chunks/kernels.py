"""Triton kernels that read a row of logits once, and that turn logits into their slopes where they lie.

What the matrix product gave may be bfloat16 or float32; every number is computed in float32. Of a product r, with a
bias b, the kernels work on a value v and a factor f whose product is the logit that is normalised:

    without a soft cap    v = r + b                            f = scale / temperature
    with a cap c          v = tanh((r + b) scale / c)          f = c / temperature

Gaps f (v_j - v_m) to the largest value lose no digits that the stored products have, and the largest value itself is
left out of the sum of exponentials: of a token that is nearly certain, what all others have together stays exact.

The file needs Triton; nothing else of the package imports it at the top.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - a kernel takes all its operands, and Triton's constants are upper case

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_READ_BLOCK, _WRITE_BLOCK, _WARPS = 4096, 8192, 8
"""As an H100 ran a prototype of these kernels fastest."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not followed
def _value(product, bias, columns, inside, inner, BIAS: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return v of products; one that is minus infinity, left out of the support, stays so."""
    value = product.to(tl.float32)
    if BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        size = tl.abs(value) * inner
        decayed = tl.exp(-2.0 * size)
        square = size * size
        # Near zero 1 - decayed keeps few digits, and six terms of the series keep all.
        series = size * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        bent = tl.where(size < 0.25, series, (1 - decayed) / (1 + decayed))
        value = tl.where(value == float("-inf"), value, tl.where(value < 0, -bent, bent))
    return value


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not followed
def _read_rows(  # type: ignore[no-untyped-def]
    products, bias, targets, out, rows, columns, stride, inner, factor,
    BIAS: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write, of one row: the largest v; the exponentials' sum without it; v of the target; the mean gap; a count."""
    row = tl.program_id(0).to(tl.int64)
    base = products + row * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane, which sees every BLOCK-th column
    rest = tl.zeros([BLOCK], tl.float32)
    gaps = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < columns
        value = _value(
            tl.load(base + index, mask=inside, other=float("-inf")), bias, index, inside, inner, BIAS, CAPPED
        )
        higher = value > top
        # Minus infinity minus itself is no number; such a lane's sums get no weight in the end.
        gap = tl.where(value == top, 0.0, (tl.where(higher, top - value, value - top)) * factor)
        small = tl.exp(gap)
        if ENTROPY:
            moved = tl.where(small > 0, small * (gaps + gap * (rest + 1)), 0.0)
            gaps = tl.where(higher, moved, gaps + tl.where(small > 0, small * gap, 0.0))
        rest = tl.where(higher, small * (rest + 1), rest + small)
        count = tl.where(higher, 1.0, tl.where(value == top, count + 1, count))
        top = tl.where(higher, value, top)
    best = tl.max(top, 0)
    gap = tl.where(top == best, 0.0, (top - best) * factor)
    weight = tl.exp(gap)
    lanes = tl.sum(tl.where(top == best, 1.0, 0.0), 0)
    others = tl.sum(weight * rest, 0) + tl.sum(tl.where(top == best, 0.0, weight), 0) + (lanes - 1)
    target = tl.load(targets + row)
    chosen = _value(tl.load(base + target), bias, target, True, inner, BIAS, CAPPED)
    tl.store(out + row, best)
    tl.store(out + rows + row, others)
    tl.store(out + 2 * rows + row, chosen)
    tl.store(out + 4 * rows + row, tl.sum(tl.where(top == best, count, 0.0), 0))
    if ENTROPY:
        total = tl.sum(tl.where(weight > 0, weight * (gaps + gap * (rest + 1)), 0.0), 0)
        tl.store(out + 3 * rows + row, total / (1 + others))
    else:
        tl.store(out + 3 * rows + row, 0.0)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not followed
def _write_slopes(  # type: ignore[no-untyped-def]
    products, bias, targets, numbers, rows, columns, stride, inner, factor,
    BIAS: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Overwrite products of one row with the loss's derivatives by them."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < columns
    place = products + row * stride + index
    value = _value(tl.load(place, mask=inside, other=float("-inf")), bias, index, inside, inner, BIAS, CAPPED)
    best, log_total = tl.load(numbers + row), tl.load(numbers + rows + row)
    by_logprob, at_target = tl.load(numbers + 3 * rows + row), tl.load(numbers + 4 * rows + row)
    gap = (value - best) * factor
    share = tl.exp(gap - log_total)
    slope = tl.where(index == tl.load(targets + row), at_target, -by_logprob * share)
    if ENTROPY:
        mean_gap, by_entropy = tl.load(numbers + 2 * rows + row), tl.load(numbers + 5 * rows + row)
        slope -= by_entropy * tl.where(share > 0, share * (gap - mean_gap), 0.0)
    slope *= factor
    if CAPPED:
        bent = tl.where(value == float("-inf"), 0.0, value)
        slope *= inner * (1 - bent * bent)
    tl.store(place, slope.to(products.dtype.element_ty), mask=inside)


def read_rows(
    products: Tensor, bias: Tensor | None, targets: Tensor, inner: float | None, factor: float, *, entropy: bool
) -> Tensor:
    """Return [5, n] float32, as `_read_rows` writes them."""
    rows, columns = products.shape
    out = torch.empty(5, rows, dtype=torch.float32, device=products.device)
    options: dict[str, Any] = {"BIAS": bias is not None, "CAPPED": inner is not None, "ENTROPY": entropy}
    _read_rows[(rows,)](
        products, products if bias is None else bias, targets, out, rows, columns, products.stride(0), inner or 0.0,
        factor, **options, BLOCK=_READ_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return out


def write_slopes(
    products: Tensor, bias: Tensor | None, targets: Tensor, numbers: Tensor, inner: float | None, factor: float,
    *, entropy: bool,
) -> None:  # fmt: skip
    """Overwrite products [n, V] with slopes.

    Args:
        products, bias, targets, inner, factor: As they were read.
        numbers: [6, n] float32: the largest v, the logarithm of the exponentials' sum, the mean gap; derivatives by the
            log-probability, by the target's own logit, and by the entropy.
        entropy: Whether the last of these is not 0.
    """
    rows, columns = products.shape
    options: dict[str, Any] = {"BIAS": bias is not None, "CAPPED": inner is not None, "ENTROPY": entropy}
    _write_slopes[(rows, triton.cdiv(columns, _WRITE_BLOCK))](
        products, products if bias is None else bias, targets, numbers, rows, columns, products.stride(0), inner or 0.0,
        factor, **options, BLOCK=_WRITE_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
