"""Where documents begin and end in a packed row, in the forms that attention reads.

Eager attention reads lengths on the host. A compiled block must not: a Python number decides which program runs, and
every batch has other lengths. So whatever such a block reads is a tensor here, of a size that may change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from holdfast.models.layers.exchange import RowExchange


@dataclass(frozen=True)
class KernelRuns:
    """Runs of queries and the keys that each sees, as torch's variable-length kernel takes them.

    A run is a whole document, or a head that branches share, or one of its branches. The kernel aligns the last query
    of a run with its last key, so a branch sees its head and itself.
    """

    query_offsets: Tensor
    """[runs + 1] int32 on the device: where the queries of each run start, and the end of the last."""
    key_offsets: Tensor
    """As `query_offsets`, of the keys."""
    key_index: Tensor | None
    """[keys] int64 on the device: the position in the row of each key; None where they are those of the queries."""
    longest: tuple[Tensor, Tensor]
    """Two tensors without data on the host, as long as the longest run of queries and of keys."""


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in a packed row."""

    lengths: tuple[int, ...]
    """Tokens of each, on the host."""
    branches: tuple[tuple[int, ...], ...]
    """Of each: lengths of the parts that share its head and do not see each other; empty if it is one sequence."""
    layout: Tensor
    """[documents, 1 + most branches] int64 on the host: the length of each and those of its branches. Rows and columns
    of zeros mean nothing; there are at least two of both."""
    runs: KernelRuns
    exchange: RowExchange | None = None
    """Set where this rank computes a span of the row, and attention needs all of it."""

    @classmethod
    def of(
        cls,
        lengths: tuple[int, ...],
        device: torch.device,
        branches: tuple[tuple[int, ...], ...] | None = None,
        exchange: RowExchange | None = None,
    ) -> Documents:
        """Lay documents of these lengths side by side."""
        branches = branches or tuple(() for _ in lengths)
        return cls(lengths, branches, _layout(lengths, branches), _runs(lengths, branches, device), exchange)


def neighbours(
    lengths: Sequence[int], branches: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Yield (start, documents, length, branches) for each run of neighbours of equal shape."""
    start = 0
    for (length, parts), run in groupby(zip(lengths, branches, strict=True)):
        count = len(list(run))
        yield start, count, length, parts
        start += count * length


def read_layout(layout: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the lengths of documents and of their branches, which `Documents.layout` holds."""
    rows = [[number for number in row if number] for row in layout.tolist()]
    rows = [row for row in rows if row]
    return tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows)


def key_places(
    lengths: Sequence[int], branches: Sequence[tuple[int, ...]]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return where the keys of each run of queries lie, [all keys] int64, and how many queries and keys each run has.

    Keys of a head are repeated for each of its branches; queries are not.
    """
    places, queries, keys, start = [], [], [], 0
    for length, parts in zip(lengths, branches, strict=True):
        head = length - sum(parts)
        shared = torch.arange(start, start + head)
        if head:
            places.append(shared)
            queries.append(head)
            keys.append(head)
        after = start + head
        for part in parts:
            places += [shared, torch.arange(after, after + part)]
            queries.append(part)
            keys.append(head + part)
            after += part
        start += length
    return torch.cat(places), tuple(queries), tuple(keys)


def _layout(lengths: Sequence[int], branches: Sequence[tuple[int, ...]]) -> Tensor:
    # Sizes of 0 and 1 are constants to the compiler.
    layout = torch.zeros(max(2, len(lengths)), max(2, 1 + max(map(len, branches), default=0)), dtype=torch.int64)
    for row, (length, parts) in enumerate(zip(lengths, branches, strict=True)):
        layout[row, : 1 + len(parts)] = torch.tensor((length, *parts))
    return _of_any_size(layout)


def _runs(lengths: tuple[int, ...], branches: tuple[tuple[int, ...], ...], device: torch.device) -> KernelRuns:
    queries = keys = lengths
    key_index: Tensor | None = None
    if any(branches):
        places, queries, keys = key_places(lengths, branches)
        key_index = _of_any_size(places.to(device, non_blocking=True))
    query_offsets = _offsets(queries, device)
    key_offsets = query_offsets if key_index is None else _offsets(keys, device)
    return KernelRuns(query_offsets, key_offsets, key_index, (_as_size(max(queries)), _as_size(max(keys))))


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return _of_any_size(ends.to(device, non_blocking=True))


def _as_size(number: int) -> Tensor:
    """Return a number as the size of a tensor without data, since the compiler takes an attribute for a constant."""
    return _of_any_size(torch.zeros(()).expand(number))


def _of_any_size(tensor: Tensor) -> Tensor:
    """Mark all sizes of a tensor as ones that change, so that a compiled block is not compiled again for each."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # takes a second to import; where it is not, nothing is compiled
    if dynamo is not None:
        dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
    return tensor
