"""Lay sequences side by side without padding, and take them apart again.

Only this file knows the shift between a token and the position that predicts it: it writes `predictor_index`, and
everything else gathers by it. `unpack` is the exact inverse of `pack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.weights import Share
from holdfast.types import Batch, Example


def pack(
    examples: Sequence[Example],
    shares: Sequence[Share],
    *,
    padded: bool = False,
    pad_token: int = 0,
    dtype: torch.dtype = torch.float32,
    columns: Mapping[str, Any] | None = None,
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

    Raises:
        ValueError: A sequence cannot be taken apart again as it was, or its first token is trained: nothing predicts
            it.
    """
    _refuse_what_would_change(examples)
    rows = _rows(examples, padded)
    width = max(1, *(sum(lengths) for lengths in rows))
    filled = _Columns.empty(len(rows), width, pad_token, examples, columns or {})
    index = 0
    for row, row_lengths in enumerate(rows):
        start = 0
        for length in row_lengths:
            filled.put((row, slice(start, start + length)), index, examples[index], shares[index].weight)
            start += length
            index += 1
        filled.position_ids[row, start:] = np.arange(width - start)
    return Batch(
        tokens=_tensor(filled.tokens),
        position_ids=_tensor(filled.position_ids)[None],
        sequence_ids=_tensor(filled.sequence_ids),
        predictor_index=_tensor(filled.predictor_index),
        loss_mask=_tensor(filled.loss_mask),
        weights=_tensor(filled.weights).to(dtype),
        scored=_tensor(np.flatnonzero(filled.loss_mask)),
        lengths=tuple((*row, width - sum(row)) if sum(row) < width else row for row in rows),
        sample_ids=tuple(example.sample_id for example in examples),
        prompt_ids=tuple(example.prompt_id for example in examples),
        sources=tuple(example.source for example in examples),
        count=float(sum(share.count for share in shares)),
        per_token={name: _tensor(values) for name, values in filled.per_token.items()},
    )


def _refuse_what_would_change(examples: Sequence[Example]) -> None:
    for example in examples:
        if example.loss_mask[:1].any():
            raise ValueError(f"sample {example.sample_id}: the first token cannot be trained, nothing predicts it")
        if _kinds(example) != _kinds(examples[0]):
            raise ValueError(
                f"sample {example.sample_id} carries {_kinds(example)} per token, sample {examples[0].sample_id} "
                f"carries {_kinds(examples[0])}; sequences of one pack carry the same"
            )
        if example.model_inputs:
            raise ValueError(f"sample {example.sample_id}: {', '.join(example.model_inputs)} cannot be packed")


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
            tokens=batch.tokens[row, start:end].numpy(),
            loss_mask=batch.loss_mask[row, start:end].numpy(),
            per_token={name: values[row, start:end].numpy() for name, values in batch.per_token.items()},
        )
        for index, (row, start, end) in enumerate(places(batch))
    ]


def split_tokens(batch: Batch, values: Tensor) -> list[Tensor]:
    """Cut a [B, T] tensor into one [L] view per sequence, in packing order."""
    return [values[row, start:end] for row, start, end in places(batch)]


def places(batch: Batch) -> list[tuple[int, int, int]]:
    """Return (row, start, end) of every sequence; padding is left out."""
    result = []
    remaining = len(batch.sample_ids)
    for row, lengths in enumerate(batch.lengths):
        start = 0
        members = min(1, remaining) if batch.is_padded else min(len(lengths), remaining)
        for length in lengths[:members]:
            result.append((row, start, start + length))
            start += length
        remaining -= members
    return result


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on a device."""
    if batch.tokens.device == device:
        return batch
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    for name in ("per_token", "model_inputs"):
        moved[name] = {key: value.to(device, non_blocking=True) for key, value in getattr(batch, name).items()}
    return replace(batch, **moved)


@dataclass(frozen=True)
class _Columns:
    """The arrays of one batch while they are filled, [B, T] each."""

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
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
        return _Columns(
            tokens=np.full(shape, pad_token, dtype=np.int64),
            position_ids=np.zeros(shape, dtype=np.int64),
            sequence_ids=np.full(shape, -1, dtype=np.int64),
            predictor_index=np.full(shape, -1, dtype=np.int64),
            loss_mask=np.zeros(shape, dtype=np.bool_),
            weights=np.zeros(shape, dtype=np.float64),
            per_token={
                name: np.zeros((*shape, *values.shape[1:]), dtype=values.dtype) for name, values in extras.items()
            },
        )

    def put(self, where: tuple[int, slice], index: int, example: Example, weight: float) -> None:
        """Write one sequence to a stretch of a row."""
        row, stretch = where
        positions = np.arange(stretch.start, stretch.stop)
        self.tokens[where] = example.tokens
        self.position_ids[where] = positions - stretch.start
        self.sequence_ids[where] = index
        self.predictor_index[row, stretch.start + 1 : stretch.stop] = positions[:-1]
        self.loss_mask[where] = example.loss_mask
        self.weights[where] = weight * example.loss_mask
        for name, values in example.per_token.items():
            self.per_token[name][where] = values


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
