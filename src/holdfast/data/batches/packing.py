"""Pack sequences into rows without padding, and unpack them again.

Only this file knows the shift between a token and the position that predicts it: it writes `predictor_index`, and
everything else gathers by it. `unpack` is the exact inverse of `pack`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.batches.transfer import with_tensors
from holdfast.data.batches.weights import Share
from holdfast.types import Batch, Example


class CommonStart(NamedTuple):
    """First tokens that neighbouring sequences have in common."""

    members: int
    """How many sequences."""
    tokens: int
    """How many tokens; for one sequence alone it does not matter."""


def pack(  # noqa: PLR0913 - sequences, and the rules of a pack
    examples: Sequence[Example],
    shares: Sequence[Share],
    *,
    padded: bool = False,
    pad_token: int = 0,
    dtype: torch.dtype = torch.float32,
    columns: Mapping[str, Any] | None = None,
    heads: Sequence[CommonStart] | None = None,
    stand_in: Mapping[str, NDArray[Any]] | None = None,
    multiple_of: int = 1,
) -> Batch:
    """Build one micro-batch, in the order given.

    Args:
        examples: Its sequences; an empty list gives a batch of one untrained token, so that an idle rank can take part
            in the collectives.
        shares: Weight and count of each.
        padded: One sequence per row, filled up with `pad_token`; the reference form. Otherwise one row without padding.
        pad_token: A token the embedding knows.
        dtype: Dtype of the weights.
        columns: Names and dtypes of what tokens carry, for a batch without sequences; others say it themselves.
        heads: Which neighbours share their first tokens; those are laid down once. Not with `padded`. Model inputs of
            such neighbours are those of their head, and the same.
        stand_in: Model inputs for a batch whose sequences have none, while those of other ranks do.
        multiple_of: The width of a row is padded to a multiple of it.

    Raises:
        ValueError: A sequence cannot be taken apart again as it was, or its first token is trained: nothing predicts
            it.
    """
    _refuse_what_would_change(examples)
    if heads is not None and any(head.members > 1 for head in heads):
        return _with_stand_in(_pack_branches(examples, shares, heads, pad_token, dtype, multiple_of), stand_in)
    rows = _rows(examples, padded)
    width = max(1, *(sum(lengths) for lengths in rows))
    width += -width % multiple_of
    filled = _Columns.empty(len(rows), width, pad_token, examples, columns or {})
    index = 0
    for row, row_lengths in enumerate(rows):
        start = 0
        for length in row_lengths:
            filled.put((row, slice(start, start + length)), index, examples[index], shares[index].weight)
            start += length
            index += 1
        filled.position_ids[:, row, start:] = np.arange(width - start)
    lengths = tuple((*row, width - sum(row)) if sum(row) < width else row for row in rows)
    batch = _batch(filled, examples, shares, dtype, lengths, tuple(() for _ in lengths[0]))
    return _with_stand_in(batch, stand_in)


def _with_stand_in(batch: Batch, inputs: Mapping[str, NDArray[Any]] | None) -> Batch:
    if batch.model_inputs or not inputs:
        return batch
    return replace(batch, model_inputs={name: _tensor(values) for name, values in inputs.items()})


def _pack_branches(  # noqa: PLR0913, PLR0917 - as `pack`
    examples: Sequence[Example],
    shares: Sequence[Share],
    heads: Sequence[CommonStart],
    pad_token: int,
    dtype: torch.dtype,
    multiple_of: int,
) -> Batch:
    """Lay each head down once, and what its sequences have of their own after it, one after the other."""
    documents, first = [], 0
    for head in heads:
        documents.append((head.tokens if head.members > 1 else 0, range(first, first + head.members)))
        first += head.members
    branch_lengths = [[examples[index].tokens.size - size for index in members] for size, members in documents]
    lengths = tuple(size + sum(branch) for (size, _), branch in zip(documents, branch_lengths, strict=True))
    padding = -sum(lengths) % multiple_of
    filled = _Columns.empty(1, sum(lengths) + padding, pad_token, examples, {})
    filled.position_ids[:, 0, sum(lengths) :] = np.arange(padding)
    start = 0
    for (size, members), length in zip(documents, lengths, strict=True):
        _refuse_other_heads([examples[index] for index in members], size)
        _put_members(filled, start, size, members, examples, shares)
        start += length
    branches = tuple(tuple(branch) if size else () for (size, _), branch in zip(documents, branch_lengths, strict=True))
    filler = (padding,) if padding else ()  # a document of its own, which is no branch
    return _batch(filled, examples, shares, dtype, (lengths + filler,), branches + ((),) * len(filler))


def _put_members(  # noqa: PLR0913, PLR0917 - one call's own arguments
    filled: _Columns, start: int, size: int, members: range, examples: Sequence[Example], shares: Sequence[Share]
) -> None:
    """Put a head of `size` tokens at `start`, and behind it what each of its members adds."""
    after = start + size
    for index in members:
        end = after + examples[index].tokens.size - size
        if index == members[0]:
            filled.put((0, slice(start, end)), index, examples[index], shares[index].weight)
        else:
            filled.put_branch(slice(after, end), start, index, examples[index], shares[index])
        after = end


def _refuse_other_heads(members: Sequence[Example], size: int) -> None:
    for example in members:
        if len(members) > 1 and not _same_inputs(example, members[0], size):
            raise ValueError(
                f"sample {example.sample_id}: its positions, or {', '.join(example.model_inputs) or 'lack of inputs'}, "
                f"are not those of sample {members[0].sample_id}, and so they cannot share a head"
            )
        if not np.array_equal(example.tokens[:size], members[0].tokens[:size]):
            raise ValueError(f"sample {example.sample_id} does not begin like sample {members[0].sample_id}")
        if example.loss_mask[:size].any():
            raise ValueError(f"sample {example.sample_id}: a token of the shared head would be trained")


def _same_inputs(example: Example, reference: Example, size: int) -> bool:
    """Say whether two sequences bring the same inputs, and begin at the same positions."""
    if example.model_inputs.keys() != reference.model_inputs.keys() or (example.positions is None) != (
        reference.positions is None
    ):
        return False
    pairs = [(values, reference.model_inputs[name]) for name, values in example.model_inputs.items()]
    if example.positions is not None and reference.positions is not None:
        pairs.append((example.positions[:, :size], reference.positions[:, :size]))
    return all(first is second or np.array_equal(first, second) for first, second in pairs)


def _batch(
    filled: _Columns,
    examples: Sequence[Example],
    shares: Sequence[Share],
    dtype: torch.dtype,
    lengths: tuple[tuple[int, ...], ...],
    branches: tuple[tuple[int, ...], ...],
) -> Batch:
    return Batch(
        tokens=_tensor(filled.tokens),
        position_ids=_tensor(filled.position_ids),
        sequence_ids=_tensor(filled.sequence_ids),
        predictor_index=_tensor(filled.predictor_index),
        loss_mask=_tensor(filled.loss_mask),
        weights=_tensor(filled.weights).to(dtype),
        scored=_tensor(np.flatnonzero(filled.loss_mask)),
        lengths=lengths,
        branches=branches,
        sample_ids=tuple(example.sample_id for example in examples),
        prompt_ids=tuple(example.prompt_id for example in examples),
        sources=tuple(example.source for example in examples),
        counts=tuple(share.count for share in shares),
        count=float(sum(share.count for share in shares)),
        per_token={name: _tensor(values) for name, values in filled.per_token.items()},
        **_joined(examples, set(_after_a_head(branches))),
    )


def _after_a_head(branches: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the index of each sequence whose head an earlier one has brought."""
    index = 0
    for branch_lengths in branches:
        members = max(1, len(branch_lengths))
        yield from range(index + 1, index + members)
        index += members


def _joined(examples: Sequence[Example], without: Collection[int]) -> dict[str, Any]:
    """Return the model inputs of all sequences but some, and how many rows are each one's."""
    names = sorted({name for example in examples for name in example.model_inputs})
    by_name = {
        name: [None if index in without else example.model_inputs.get(name) for index, example in enumerate(examples)]
        for name in names
    }
    return {
        "model_inputs": {
            name: _tensor(np.concatenate([array for array in arrays if array is not None]))
            for name, arrays in by_name.items()
        },
        "model_input_rows": {
            name: tuple(0 if array is None else len(array) for array in arrays) for name, arrays in by_name.items()
        },
    }


def _refuse_what_would_change(examples: Sequence[Example]) -> None:
    for example in examples:
        if example.loss_mask[:1].any():
            raise ValueError(f"sample {example.sample_id}: the first token cannot be trained, nothing predicts it")
        if _kinds(example) != _kinds(examples[0]):
            raise ValueError(
                f"sample {example.sample_id} carries {_kinds(example)} per token, sample {examples[0].sample_id} "
                f"carries {_kinds(examples[0])}; sequences of one pack carry the same"
            )
    shapes: dict[str, tuple[int, str]] = {}
    for example in examples:
        for name, values in example.model_inputs.items():
            kind = f"{values.dtype}{list(values.shape[1:])}"
            first, first_kind = shapes.setdefault(name, (example.sample_id, kind))
            if kind != first_kind or not len(values):
                raise ValueError(
                    f"sample {example.sample_id} has {len(values)} rows of {name} of {kind}, sample {first} has "
                    f"{first_kind}"
                )


def _kinds(example: Example) -> dict[str, str]:
    """Return dtype and shape of what an example carries per token."""
    return {name: f"{values.dtype}{list(values.shape[1:])}" for name, values in sorted(example.per_token.items())}


def _rows(examples: Sequence[Example], padded: bool) -> list[tuple[int, ...]]:
    """Return the lengths of the sequences of each row; no example makes one empty row."""
    lengths = tuple(example.tokens.size for example in examples)
    return [(length,) for length in lengths] if padded and lengths else [lengths]


def unpack(batch: Batch) -> list[Example]:
    """Return the sequences of a batch, in the order they were packed."""
    return [
        Example(
            sample_id=batch.sample_ids[index],
            prompt_id=batch.prompt_ids[index],
            source=batch.sources[index],
            tokens=batch.tokens[row, columns].numpy(),
            loss_mask=batch.loss_mask[row, columns].numpy(),
            per_token={name: values[row, columns].numpy() for name, values in batch.per_token.items()},
            model_inputs=_own_inputs(batch, index),
            positions=_own_positions(batch.position_ids[:, row, columns].numpy()),
        )
        for index, (row, columns) in enumerate(places(batch))
    ]


def _own_inputs(batch: Batch, index: int) -> dict[str, NDArray[Any]]:
    """Return the model inputs of one sequence; those of a shared head are its first sequence's."""
    after = set(_after_a_head(batch.branches))
    while index in after:
        index -= 1
    inputs = {}
    for name, rows in batch.model_input_rows.items():
        if rows[index]:
            start = sum(rows[:index])
            inputs[name] = batch.model_inputs[name][start : start + rows[index]].numpy()
    return inputs


def _own_positions(positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
    return None if (positions == np.arange(positions.shape[1])).all() else positions


def split_tokens(batch: Batch, values: Tensor) -> list[Tensor]:
    """Cut a [B, T] tensor into one [L] tensor per sequence, in packing order; a view where the sequence is whole."""
    return [values[row, columns] for row, columns in places(batch)]


def places(batch: Batch) -> list[tuple[int, slice | NDArray[np.int64]]]:
    """Return (row, places in it) of every sequence; padding is left out."""
    if any(batch.branches):
        return [(0, columns) for columns in islice(_branch_places(batch), len(batch.sample_ids))]
    result: list[tuple[int, slice | NDArray[np.int64]]] = []
    remaining = len(batch.sample_ids)
    for row, lengths in enumerate(batch.lengths):
        start = 0
        members = min(1, remaining) if batch.is_padded else min(len(lengths), remaining)
        for length in lengths[:members]:
            result.append((row, slice(start, start + length)))
            start += length
        remaining -= members
    return result


def _branch_places(batch: Batch) -> Iterator[slice | NDArray[np.int64]]:
    start = 0
    for length, branch_lengths in zip(batch.lengths[0], batch.branches, strict=True):
        if not branch_lengths:
            yield slice(start, start + length)
        head = np.arange(start, start + length - sum(branch_lengths))
        after = start + head.size
        for size in branch_lengths:
            yield np.concatenate([head, np.arange(after, after + size)])
            after += size
        start += length


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device."""
    if batch.tokens.device == device:
        return batch
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class _Columns:
    """The arrays of one batch while they are filled, [B, T] each."""

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    """[A, B, T]"""
    sequence_ids: NDArray[np.int64]
    predictor_index: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[np.float64]
    per_token: Mapping[str, NDArray[Any]]

    @staticmethod
    def empty(
        rows: int, width: int, pad_token: int, examples: Sequence[Example], dtypes: Mapping[str, Any]
    ) -> _Columns:
        """Return columns that hold padding only."""
        shape = (rows, width)
        nothing: Mapping[str, NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}
        extras = examples[0].per_token if examples else nothing
        axes = max((len(example.positions) for example in examples if example.positions is not None), default=1)
        return _Columns(
            tokens=np.full(shape, pad_token, dtype=np.int64),
            position_ids=np.zeros((axes, *shape), dtype=np.int64),
            sequence_ids=np.full(shape, -1, dtype=np.int64),
            predictor_index=np.full(shape, -1, dtype=np.int64),
            loss_mask=np.zeros(shape, dtype=np.bool_),
            weights=np.zeros(shape, dtype=np.float64),
            per_token={
                name: np.zeros((*shape, *values.shape[1:]), dtype=values.dtype) for name, values in extras.items()
            },
        )

    def put_branch(self, columns: slice, head: int, index: int, example: Example, share: Share) -> None:
        """Write what a sequence has of its own; its head stands at `head` already."""
        size = example.tokens.size - (columns.stop - columns.start)
        self.put((0, columns), index, _tail(example, size), share.weight)
        if example.positions is None:
            self.position_ids[:, 0, columns] += size
        self.predictor_index[0, columns][:1] = head + size - 1

    def put(self, region: tuple[int, slice], index: int, example: Example, weight: float) -> None:
        """Write one sequence to a stretch of a row."""
        row, stretch = region
        positions = np.arange(stretch.start, stretch.stop)
        self.tokens[region] = example.tokens
        model_positions = example.positions
        self.position_ids[:, row, stretch] = positions - stretch.start if model_positions is None else model_positions
        self.sequence_ids[region] = index
        self.predictor_index[row, stretch.start + 1 : stretch.stop] = positions[:-1]
        self.loss_mask[region] = example.loss_mask
        self.weights[region] = weight * example.loss_mask
        for name, values in example.per_token.items():
            self.per_token[name][region] = values


def _tail(example: Example, start: int) -> Example:
    """Return what follows the first tokens of a sequence."""
    return replace(
        example,
        tokens=example.tokens[start:],
        loss_mask=example.loss_mask[start:],
        per_token={name: values[start:] for name, values in example.per_token.items()},
        positions=None if example.positions is None else example.positions[:, start:],
    )


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
