"""Slots: device memory of rows that are decoded together, and the buckets that recorded steps are for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.rollout.local.blocks import SCRATCH
from holdfast.rollout.local.predictor import RowState

_LEAST_ROWS = 8
"""Of a bucket: a step of fewer rows takes as long, and would be recorded again as rows end."""
_LEAST_BLOCKS = 16
_BLOCKS_OF_DOUBLING = 128
"""Blocks of a row up to which a bucket doubles; beyond, it grows by eighths."""


class Bucket(NamedTuple):
    """What one step is for."""

    rows: int
    blocks: int
    """Blocks of each row that it looks at."""


def bucket_of(rows: int, blocks: int, most: int | None) -> Bucket:
    """Return the bucket that a recorded step for some rows has.

    Args:
        rows: How many.
        blocks: Blocks that the longest of them fills.
        most: Blocks that none will ever exceed; None where that is not known.
    """
    rounded = max(_LEAST_BLOCKS, power_of_two(blocks))
    if rounded > _BLOCKS_OF_DOUBLING:
        unit = rounded // 8
        rounded = -(-blocks // unit) * unit
    return Bucket(power_of_two(max(rows, _LEAST_ROWS)), rounded if most is None else min(rounded, max(most, blocks)))


def power_of_two(number: int) -> int:
    """Return the least power of two that is no less than a number."""
    return 1 << (number - 1).bit_length()


class Slots(NamedTuple):
    """Device memory of rows, all that a step changes beside keys and values."""

    state: RowState
    lengths: Tensor
    """[rows] int64, tokens of each row whose keys and values are in blocks"""
    tables: Tensor
    """[rows, blocks] int64, the blocks of each row"""
    tokens: Tensor
    """[rows, columns] int64, what was drawn since the last look"""
    logprobs: Tensor
    """[rows, columns]"""
    cursor: Tensor
    """[1] int64, the column that comes next"""

    @classmethod
    def like(cls, state: RowState, rows: int, blocks: int, columns: int, dtype: torch.dtype) -> Slots:
        """Return memory for so many rows of a kind; those that nobody fills write to the scratch block."""
        whole = state.last.new_zeros
        logprobs, tables = whole(rows, columns, dtype=dtype), whole(rows, blocks).fill_(SCRATCH)
        return cls(state.empty(rows), whole(rows), tables, whole(rows, columns), logprobs, whole(1))

    def holds(self, state: RowState) -> bool:
        """Whether rows of a kind can lie here."""
        kinds = [[(tensor.shape[1:], tensor.dtype) for tensor in some.tensors()] for some in (self.state, state)]
        same_names = list(self.state.layers) == list(state.layers)
        return kinds[0] == kinds[1] and same_names and (self.state.seen is None) == (state.seen is None)

    def first(self, rows: int, blocks: int) -> Slots:
        """Return the same memory's first rows and blocks."""
        some = slice(rows)
        tables, state = self.tables[some, :blocks], self.state.of(some)
        return Slots(state, self.lengths[some], tables, self.tokens[some], self.logprobs[some], self.cursor)

    def row_tensors(self) -> list[Tensor]:
        """Return what has a row for each slot and outlives a look, but for tables."""
        return [*self.state.tensors(), self.lengths]

    def reset(self) -> None:
        """Be as fresh memory is."""
        for tensor in (*self.row_tensors(), self.tokens, self.logprobs, self.cursor):
            tensor.zero_()
        self.tables.fill_(SCRATCH)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(tensor.nbytes for tensor in (*self.row_tensors(), self.tables, self.tokens, self.logprobs))
