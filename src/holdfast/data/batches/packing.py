"""Pack sequences into rows without padding, and unpack them again.

Only this file knows the shift between a token and the position that predicts it: it writes `predictor_index`, and
everything else gathers by it. `unpack` is the exact inverse of `pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.types import Batch, Example, MiniBatch


@dataclass(frozen=True)
class Share:
    """The weight of a sequence's tokens, and what it adds to the denominator of the loss.

    A loss is `sum(token loss * weight) / sum(count)`, both sums over all ranks and micro-batches of an update.
    """

    weight: float
    """Factor of the loss of each of its trained tokens."""
    count: float


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
    heads = heads or [CommonStart(1, 0)] * len(examples)
    documents, first = [], 0
    for members, shared in heads:
        documents.append(_Document(shared if members > 1 else 0, examples[first : first + members], first))
        first += members
    rows = [[document] for document in documents] if padded and documents else [documents]
    width = max(1, *(sum(document.tokens for document in row) for row in rows))
    width += -width % multiple_of
    filled = _Columns.empty(len(rows), width, pad_token, examples, columns or {})
    lengths = []
    for row, documents_of_row in enumerate(rows):
        end = 0
        for document in documents_of_row:
            end = filled.put(row, end, document, shares)
        if not padded:  # positions of padding would count to the length of a shorter row
            filled.position_ids[:, row, end:] = np.arange(width - end)
        filler = (width - end,) if end < width else ()  # a document of its own, which is no branch
        lengths.append((*(document.tokens for document in documents_of_row), *filler))
    branches = [document.branches for document in rows[0]]
    branches += [()] * (len(lengths[0]) - len(branches))
    batch = _batch(filled, examples, shares, dtype, tuple(lengths), tuple(branches))
    if batch.model_inputs or not stand_in:
        return batch
    return replace(batch, model_inputs={name: _tensor(values) for name, values in stand_in.items()})


@dataclass(frozen=True)
class _Document:
    """One sequence, or several that stand behind their common head."""

    head: int
    """Tokens of the head; 0 for a sequence alone."""
    examples: Sequence[Example]
    first: int
    """Index of its first sequence."""

    def __post_init__(self) -> None:
        _refuse_other_heads(self.examples, self.head)

    @property
    def own(self) -> tuple[int, ...]:
        """Tokens of each sequence behind the head."""
        return tuple(example.tokens.size - self.head for example in self.examples)

    @property
    def tokens(self) -> int:
        """Tokens of the document."""
        return self.head + sum(self.own)

    @property
    def branches(self) -> tuple[int, ...]:
        """Tokens of each branch; empty where there is no head."""
        return self.own if self.head else ()


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
    found: list[tuple[int, slice | NDArray[np.int64]]] = []
    for row, lengths in enumerate(batch.lengths):
        start = 0
        branches = batch.branches if any(batch.branches) else [()] * len(lengths)
        for length, own in islice(zip(lengths, branches, strict=True), 1 if batch.is_padded else None):
            after = start + length - sum(own)
            if not own:
                found.append((row, slice(start, after)))
            head = np.arange(start, after)
            for size in own:
                found.append((row, np.concatenate([head, np.arange(after, after + size)])))
                after += size
            start += length
    return found[: len(batch.sample_ids)]  # the last document of a row may be padding


def split_row(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the batch for one rank of a context group; the row's width is a multiple of `ranks`.

    Every rank of the group keeps the batch as it is, and computes the hidden states of one span of its positions. A
    token is scored by the rank whose span holds its predictor, so no token needs a hidden state of another rank,
    wherever documents begin. Sequences are counted by the first rank of the group alone.
    """
    if ranks == 1:
        return batch
    rows, width = batch.tokens.shape
    assert rows == 1, "rows are packed"
    assert width % ranks == 0, "the row was not padded"
    start, end = rank * width // ranks, (rank + 1) * width // ranks
    predictors = batch.predictor_index.flatten()[batch.scored]
    inside = ((predictors >= start) & (predictors < end)).nonzero().flatten()
    counted = batch if rank == 0 else replace(batch, counts=tuple(0.0 for _ in batch.counts), count=0.0)
    return replace(counted, span=(start, end), scored_in_span=inside)


def with_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with each of its tensors changed."""
    changed: dict[str, Any] = {
        field.name: change(value) for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)
    }
    for name in ("per_token", "model_inputs"):
        changed[name] = {key: change(value) for key, value in getattr(batch, name).items()}
    return replace(batch, **changed)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device."""
    if batch.tokens.device == device:
        return batch
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(mini_batch: MiniBatch, device: torch.device) -> MiniBatch:
    """Return a mini-batch that a GPU copies while the host goes on; for another device it stays as it is."""
    if device.type != "cuda":
        return mini_batch
    with torch.cuda.device(device):  # a thread begins on device 0, and pinning memory would open a context there
        batches = tuple(with_tensors(batch, Tensor.pin_memory) for batch in mini_batch.micro_batches)
    return replace(mini_batch, micro_batches=batches)


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

    def put(self, row: int, start: int, document: _Document, shares: Sequence[Share]) -> int:
        """Write a document into a row, its head once; return the place behind it."""
        end = start
        for index, example in enumerate(document.examples, document.first):
            skipped = document.head if index > document.first else 0  # the first sequence brings the head
            begin, end = end, end + example.tokens.size - skipped
            places, region = np.arange(begin, end), (row, slice(begin, end))
            self.tokens[region] = example.tokens[skipped:]
            of_model = None if example.positions is None else example.positions[:, skipped:]
            self.position_ids[:, row, begin:end] = places - begin + skipped if of_model is None else of_model
            self.sequence_ids[region] = index
            self.predictor_index[row, begin + 1 : end] = places[:-1]
            if skipped:
                self.predictor_index[row, begin:end][:1] = start + skipped - 1
            self.loss_mask[region] = example.loss_mask[skipped:]
            self.weights[region] = shares[index].weight * example.loss_mask[skipped:]
            for name, values in example.per_token.items():
                self.per_token[name][region] = values[skipped:]
        return end


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
