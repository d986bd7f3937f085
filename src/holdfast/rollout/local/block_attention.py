"""Attention that reads blocks of keys and values where they lie, by a Triton kernel of ours.

It takes the place of gathered blocks where the one new token of each row attends, on CUDA. Nobody has to believe that
of a kernel or of a model: before an engine first decodes so, one step is computed both ways, and its layers must hand
to attention the very keys and values that the cache gave them.

torch's own kernel with tables of blocks, `torch.nn.attention.varlen.varlen_attn`, is none of this: in torch 2.13 its
blocks are multiples of 256 tokens, and it knows no soft cap, no sinks and no float32; torch 2.11 has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.types import host_value

_SPLIT = 1024
"""Tokens of a row that one program of the kernel reads; a number of its own, since it decides the order of sums."""
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Dtype -> how far attention by the kernel and over gathered blocks may lie apart, relative to its largest number."""
_TOLERANCE_OF_16_BITS = 2e-2


class Operands(NamedTuple):
    """What the kernel reads and writes."""

    query: Tensor
    """[rows, heads, size]"""
    pair: tuple[Tensor, Tensor]
    """Keys and values of a layer, [blocks, block size, key heads, size]; values may have another size"""
    tables: Tensor
    """[rows, blocks] int64, the blocks of each row; what lies behind its end is never read"""
    positions: Tensor
    """[rows] int64, the last token of each row"""
    sinks: Tensor | None
    """[heads]"""
    scale: float
    window: int | None
    softcap: float | None
    split: int
    """Tokens that one program reads"""
    splits: int
    """Programs that read a row as long as the longest"""
    out: Tensor
    """[rows, heads, value size]"""
    parts: tuple[Tensor, Tensor, Tensor] | None
    """Of several splits, sums [rows, heads, splits, value size], maxima and totals [rows, heads, splits]"""

    @classmethod
    def of(  # noqa: PLR0913 - the operands of a formula
        cls,
        query: Tensor,
        pair: tuple[Tensor, Tensor],
        tables: Tensor,
        positions: Tensor,
        longest: int,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        split: int = _SPLIT,
    ) -> Operands:
        """Return operands with memory for what is written.

        Args:
            query, pair, tables, positions, sinks, window, softcap, split: As above.
            longest: Tokens of the longest row, or more.
            scale: Factor of the products; default 1 / sqrt(size).
        """
        query, sinks = query.contiguous(), None if sinks is None else sinks.contiguous()
        rows, heads, size = query.shape
        value_size, splits = pair[1].shape[3], -(-longest // split)
        parts = None
        if splits > 1:
            wide = torch.promote_types(query.dtype, torch.float32)
            sums = query.new_empty(rows, heads, splits, value_size, dtype=wide)
            maxima, totals = (query.new_empty(rows, heads, splits, dtype=wide) for _ in range(2))
            parts = sums, maxima, totals
        return cls(
            query, pair, tables, positions, sinks, size**-0.5 if scale is None else scale, window, softcap,
            split, splits, query.new_empty(rows, heads, value_size), parts,
        )  # fmt: skip


def run_kernel(given: Operands) -> None:
    """Write `given.out`."""
    from holdfast.rollout.local.block_kernels import attend

    attend(given)


class InPlace:
    """Says whether an engine's decoding steps read blocks in place, as one step has shown.

    Args:
        kernel: Writes `Operands.out`.
        planned: Nothing is computed, and only what layers do with keys and values is found out.
    """

    def __init__(self, kernel: Callable[[Operands], None] = run_kernel, *, planned: bool = False) -> None:
        self._kernel, self.planned = kernel, planned
        self.agrees: bool | None = None
        """Whether steps read in place; None until one was computed both ways."""
        self.is_comparing = False
        """Whether that step is being computed."""
        self._written: set[int] = set()
        """Layers whose keys and values it has written."""
        self._read: set[int] = set()
        """Layers whose keys and values attention got, as the cache had given them."""
        self._gaps: list[Tensor] = []
        self.reason = ""
        """Why blocks are gathered."""

    def use(self, value: int) -> None:
        """Let steps read blocks in place, or for 0 gather them."""
        self.agrees = bool(value)

    def attend(self, given: Operands) -> Tensor:
        """Return [rows, heads, value size]."""
        self._kernel(given)
        return given.out

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compute a step with gathered blocks, and beside it with blocks in place; then decide, and wait once."""
        self.is_comparing = True
        try:
            yield
        finally:
            self.is_comparing = False
        if not self.reason and self._read != self._written:
            self.reason = "this model's layers do not attend to what the cache keeps, but to what they make of it"
        if not self.reason and self._gaps:
            gap = float(host_value(torch.stack(self._gaps).max(), "attention over blocks in place"))
            if not gap <= 1:
                self.reason = f"the kernel that reads them in place differs by {gap:.1e} times what rounding explains"
        self.agrees = not self.reason

    def note_written(self, layer: int) -> None:
        """Know that a layer's keys and values are written in the step that is compared."""
        self._written.add(layer)

    def compare(self, layer: int | None, given: Operands | None, expected: Tensor) -> None:
        """Compare one layer's attention with that over gathered blocks, [rows, heads, value size].

        Args:
            layer: Whose keys and values attention got; None where they are not what the cache gave.
            given: For the kernel; None as `layer`.
            expected: What is used.
        """
        self._read.add(-1 if layer is None else layer)
        if self.reason or given is None or self.planned:
            return
        # Triton, its compiler and the driver raise errors of many kinds, and none ends a rollout that can go on.
        try:
            gap = (self.attend(given) - expected).abs().max().double() / expected.abs().max().double()
            self._gaps.append(gap / _TOLERANCES.get(expected.dtype, _TOLERANCE_OF_16_BITS))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as the comment says
            line = (str(error).strip().splitlines() or ["no reason given"])[0]
            self.reason = f"the kernel that reads them in place failed ({type(error).__name__}: {line})"
