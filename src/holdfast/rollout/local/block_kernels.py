"""Triton kernels in which the one new token of each row attends to the row's blocks where they lie.

One program has a row, a key head and a split of the row's tokens; the queries that share the key head are the rows of
its matrix products. It keeps a running maximum and normaliser (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et
al. 2022, arXiv:2205.14135). Where rows have several splits, so that a few long ones fill a card too, a second kernel
joins them. Nothing is read behind a row's end or before its window.

The file needs Triton; nothing else of the package imports it at the top.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - a kernel takes all its operands, and Triton's constants are upper case

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from holdfast.rollout.local.block_attention import Operands

_LEAST = 16
"""Rows, columns and terms that a matrix product of Triton has at least."""
_TILE, _TILE_BYTES = 64, 2**15
"""Most tokens of a tile, and bytes of its keys and values."""
STAGES = 2
"""Tiles that are on their way at once."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not followed
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, tables, positions, sinks, out, maxima, totals, table_stride, key_heads, splits,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, WHOLE: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDE_HEADS: tl.constexpr,
    WIDE_SIZE: tl.constexpr, WIDE_VALUE_SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write what the heads of one key head see in one split; its sums, maxima and totals if there are several."""
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(positions + row) + 1
    first = tl.maximum(end - WINDOW, 0) if WINDOW else end * 0
    head, size, value_size = tl.arange(0, WIDE_HEADS), tl.arange(0, WIDE_SIZE), tl.arange(0, WIDE_VALUE_SIZE)
    is_head, is_size, is_value_size = head < HEADS, size < SIZE, value_size < VALUE_SIZE
    of_all = (row * key_heads + key_head) * HEADS + head
    queries = tl.load(
        query + of_all[:, None] * SIZE + size[None, :], mask=is_head[:, None] & is_size[None, :], other=0.0
    )
    top = tl.full([WIDE_HEADS], float("-inf"), SUMS)
    total = tl.zeros([WIDE_HEADS], SUMS)
    if HAS_SINKS:  # each is a score without a value, in the first split
        sink = tl.load(sinks + key_head * HEADS + head, mask=is_head, other=0.0).to(SUMS)
        top, total = tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)
    sums = tl.zeros([WIDE_HEADS, WIDE_VALUE_SIZE], SUMS)
    for start in range(tl.maximum(split * SPLIT, first // TILE * TILE), tl.minimum((split + 1) * SPLIT, end), TILE):
        token = start + tl.arange(0, TILE)
        is_seen = (token < end) & (token >= first)
        block = tl.load(tables + row * table_stride + token // BLOCK, mask=is_seen, other=0)
        stored = (block * BLOCK + token % BLOCK) * key_heads + key_head
        key = tl.load(
            keys + stored[None, :] * SIZE + size[:, None], mask=is_seen[None, :] & is_size[:, None], other=0.0
        )
        scores = tl.dot(queries, key, input_precision="ieee", out_dtype=SUMS) * SCALE
        if CAP > 0:
            decayed = tl.exp(-2.0 * tl.abs(scores) / CAP)
            bent = CAP * (1 - decayed) / (1 + decayed)
            scores = tl.where(scores < 0, -bent, bent)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # minus infinity minus itself is no number
        decay = tl.exp(top - shift)
        weights = tl.exp(scores - shift[:, None])
        value = tl.load(
            values + stored[:, None] * VALUE_SIZE + value_size[None, :],
            mask=is_seen[:, None] & is_value_size[None, :],
            other=0.0,
        )
        product = tl.dot(weights.to(value.dtype), value, input_precision="ieee", out_dtype=SUMS)
        sums = sums * decay[:, None] + product
        total = total * decay + tl.sum(weights, 1)
        top = higher
    is_out = is_head[:, None] & is_value_size[None, :]
    if WHOLE:
        place = out + of_all[:, None] * VALUE_SIZE + value_size[None, :]
        tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_out)
    else:
        of_splits = of_all * splits + split
        tl.store(maxima + of_splits, top, mask=is_head)
        tl.store(totals + of_splits, total, mask=is_head)
        place = out + of_splits[:, None] * VALUE_SIZE + value_size[None, :]
        tl.store(place, sums, mask=is_out)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not followed
def _join(  # type: ignore[no-untyped-def]
    sums, maxima, totals, out, splits,
    VALUE_SIZE: tl.constexpr, WIDE_VALUE_SIZE: tl.constexpr, WIDE_SPLITS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write what one head of one row sees in all splits; where it sees nothing, all is 0 and the maximum -infinity."""
    head = tl.program_id(0).to(tl.int64)
    split, value_size = tl.arange(0, WIDE_SPLITS), tl.arange(0, WIDE_VALUE_SIZE)
    is_split, is_size = split < splits, value_size < VALUE_SIZE
    high = tl.load(maxima + head * splits + split, mask=is_split, other=float("-inf"))
    top = tl.max(high, 0)
    total = tl.sum(tl.exp(high - top) * tl.load(totals + head * splits + split, mask=is_split, other=0.0), 0)
    joined = tl.zeros([WIDE_VALUE_SIZE], SUMS)
    for one in range(splits):
        part = head * splits + one
        place = sums + part * VALUE_SIZE + value_size
        joined += tl.exp(tl.load(maxima + part) - top) * tl.load(place, mask=is_size, other=0.0)
    tl.store(out + head * VALUE_SIZE + value_size, (joined / total).to(out.dtype.element_ty), mask=is_size)


class Launch(NamedTuple):
    """One kernel's call."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def launches(given: Operands) -> list[Launch]:
    """Return the calls that write `given.out`, by way of `given.parts` where rows have several splits."""
    query, (keys, values) = given.query, given.pair
    rows, heads, size = query.shape
    block_size, key_heads, value_size = values.shape[1:]
    wide_size, wide_value_size = (max(_LEAST, triton.next_power_of_2(some)) for some in (size, value_size))
    tile = _TILE
    while tile > _LEAST and tile * (wide_size + wide_value_size) * keys.element_size() > _TILE_BYTES:
        tile //= 2
    of_values = {
        "VALUE_SIZE": value_size,
        "WIDE_VALUE_SIZE": wide_value_size,
        "SUMS": tl.float64 if query.dtype == torch.float64 else tl.float32,
    }
    constants = of_values | {
        "SCALE": given.scale,
        "CAP": given.softcap or 0.0,
        "WINDOW": given.window or 0,
        "HAS_SINKS": given.sinks is not None,
        "WHOLE": given.parts is None,
        "HEADS": heads // key_heads,
        "SIZE": size,
        "WIDE_HEADS": max(_LEAST, triton.next_power_of_2(heads // key_heads)),
        "WIDE_SIZE": wide_size,
        "BLOCK": block_size,
        "TILE": tile,
        "SPLIT": given.split,
    }
    sinks = query if given.sinks is None else given.sinks
    parts = (given.out,) * 3 if given.parts is None else given.parts
    arguments = (query, keys, values, given.tables, given.positions, sinks, *parts)
    sizes = (given.tables.stride(0), key_heads, given.splits)
    found = [Launch(_attend, (rows, key_heads, given.splits), (*arguments, *sizes), constants)]
    if given.parts is not None:
        constants = of_values | {"WIDE_SPLITS": triton.next_power_of_2(given.splits)}
        found.append(Launch(_join, (rows * heads,), (*given.parts, given.out, given.splits), constants))
    return found


def attend(given: Operands) -> None:
    """Write `given.out`."""
    for kernel, grid, arguments, constants in launches(given):
        kernel[grid](*arguments, **constants, num_stages=STAGES)
