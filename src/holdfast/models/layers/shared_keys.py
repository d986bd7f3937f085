"""Keys and values of heads that branches share, repeated before each branch, and the way back for their gradients.

The gradient of a key is a sum over the runs that see it: `key[:, :, index]` alone would sort all places to form it, in
bfloat16 too. Here the keys of heads are added up branch by branch, as far as heads have so many, in float32 or better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def key_places(
    lengths: Sequence[int], branches: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.int64], tuple[int, ...], tuple[int, ...]]:
    """Return where the keys of each run of queries lie, [all keys], and how many queries and keys each run has.

    Keys of a head are repeated for each of its branches; queries are not.
    """
    places, queries, keys, start = [], [], [], 0
    for length, parts in zip(lengths, branches, strict=True):
        head = length - sum(parts)
        shared = np.arange(start, start + head)
        if head:
            places.append(shared)
            queries.append(head)
            keys.append(head)
        after = start + head
        for part in parts:
            places += [shared, np.arange(after, after + part)]
            queries.append(part)
            keys.append(head + part)
            after += part
        start += length
    return np.concatenate(places), tuple(queries), tuple(keys)


@dataclass(frozen=True)
class SharedKeys:
    """Where keys are repeated, and how their gradients come back; all int64, on the device but for `counts`."""

    places: Tensor
    """[all keys], the position in the row of each."""
    own: Tensor
    """[T], where each key of the row stands first among all keys."""
    shared: Tensor
    """[S + copies], positions of keys that stand there more than once, the most frequent first; then where they stand a
    second time, where those of them that do so stand a third time, and so on."""
    counts: Tensor
    """[at least 2], on the host: how many stand there twice, three times, and so on; zeros mean nothing."""

    @classmethod
    def of(cls, places: NDArray[np.int64]) -> SharedKeys:
        """Follow `key_places`, on the host."""
        order = np.argsort(places, kind="stable")
        sizes = np.bincount(places)
        starts = np.cumsum(sizes) - sizes
        most = int(sizes.max())
        shared = np.argsort(-sizes, kind="stable")[: (sizes > 1).sum()]
        turns = [order[starts[shared[: (sizes > turn).sum()]] + turn] for turn in range(1, most)]
        # Sizes of 0 and 1 are constants to the compiler.
        counts = [len(turn) for turn in turns] + [0] * (3 - most)
        return cls(*(torch.tensor(each) for each in (places, order[starts], np.concatenate([shared, *turns]), counts)))


def repeat_keys(keys: Tensor, where: SharedKeys) -> Tensor:
    """Return [1, heads, all keys, size] of keys or values [1, heads, T, size]."""
    repeated: Tensor = _repeat(keys, where.places, where.own, where.shared, where.counts)
    return repeated


@torch.library.custom_op("holdfast::repeat_keys", mutates_args=())
def _repeat(keys: Tensor, places: Tensor, own: Tensor, shared: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG001 - the way back needs them
    return keys.index_select(2, places)


@torch.library.custom_op("holdfast::add_repeated_keys", mutates_args=())
def _add(gradient: Tensor, own: Tensor, shared: Tensor, counts: Tensor) -> Tensor:
    sizes: list[int] = counts.tolist()
    positions, *again = torch.split(shared, [sizes[0], *sizes])
    total = gradient.index_select(2, own)
    sums = total.index_select(2, positions).to(torch.promote_types(gradient.dtype, torch.float32))
    for places in again:
        sums[:, :, : len(places)] += gradient.index_select(2, places)
    return total.index_copy_(2, positions, sums.to(total.dtype))


@_repeat.register_fake
def _(keys: Tensor, places: Tensor, *_: Tensor) -> Tensor:
    return keys.new_empty(1, keys.shape[1], places.shape[0], keys.shape[3])


@_add.register_fake
def _(gradient: Tensor, own: Tensor, *_: Tensor) -> Tensor:
    return gradient.new_empty(1, gradient.shape[1], own.shape[0], gradient.shape[3])


def _save_places(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs[2:])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _add(gradient, *ctx.saved_tensors), None, None, None, None


_repeat.register_autograd(_differentiate, setup_context=_save_places)
