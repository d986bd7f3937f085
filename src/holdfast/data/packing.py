"""Lay sequences side by side without padding, and take them apart again.

Only this file knows the shift between a token and the position that predicts it: it writes `predictor_index`, and
everything else gathers by it. `unpack` is the exact inverse of `pack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.weights import Share
from holdfast.types import Batch, Example

_FIXED_COLUMNS = frozenset({"tokens", "position_ids", "sequence_ids", "predictor_index", "loss_mask", "weights"})


def pack(
    examples: Sequence[Example],
    shares: Sequence[Share],
    *,
    padded: bool = False,
    pad_token: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Build one micro-batch, in the order given.

    Args:
        examples: Its sequences; an empty list gives a batch of one untrained token, so that an idle rank can take part
            in the collectives.
        shares: Weight and count of each.
        padded: One sequence per row, filled up with `pad_token`; the reference form. Otherwise one row without padding.
        pad_token: A token the embedding knows.
        dtype: Dtype of the weights.

    Raises:
        ValueError: The first token of a sequence is trained: nothing predicts it.
    """
    _refuse_trained_starts(examples)
    rows = _rows(examples, padded)
    width = max(1, *(sum(lengths) for lengths in rows))
    columns = _empty_columns(len(rows), width, pad_token, examples)
    index = 0
    for row, row_lengths in enumerate(rows):
        start = 0
        for _ in row_lengths:
            start = _place(columns, row, start, index, examples[index], shares[index])
            index += 1
    lengths = tuple((*row, width - sum(row)) if sum(row) < width else row for row in rows)
    loss_mask = columns["loss_mask"]
    return Batch(
        tokens=_tensor(columns["tokens"]),
        position_ids=_tensor(columns["position_ids"])[None],
        sequence_ids=_tensor(columns["sequence_ids"]),
        predictor_index=_tensor(columns["predictor_index"]),
        loss_mask=_tensor(loss_mask),
        weights=_tensor(columns["weights"]).to(dtype),
        scored=_tensor(np.flatnonzero(loss_mask)),
        lengths=lengths,
        sample_ids=tuple(example.sample_id for example in examples),
        prompt_ids=tuple(example.prompt_id for example in examples),
        sources=tuple(example.source for example in examples),
        count=float(sum(share.count for share in shares)),
        per_token={name: _tensor(values) for name, values in columns.items() if name not in _FIXED_COLUMNS},
    )


def _refuse_trained_starts(examples: Sequence[Example]) -> None:
    for example in examples:
        if example.loss_mask[:1].any():
            raise ValueError(f"sample {example.sample_id}: the first token cannot be trained, nothing predicts it")


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


def _empty_columns(
    rows: int, width: int, pad_token: int, examples: Sequence[Example]
) -> dict[str, NDArray[np.generic]]:
    columns: dict[str, NDArray[np.generic]] = {
        "tokens": np.full((rows, width), pad_token, dtype=np.int64),
        "position_ids": np.tile(np.arange(width, dtype=np.int64), (rows, 1)),
        "sequence_ids": np.full((rows, width), -1, dtype=np.int64),
        "predictor_index": np.full((rows, width), -1, dtype=np.int64),
        "loss_mask": np.zeros((rows, width), dtype=np.bool_),
        "weights": np.zeros((rows, width), dtype=np.float64),
    }
    extras: Mapping[str, NDArray[np.generic]] = examples[0].per_token if examples else {}
    for name, values in extras.items():
        columns[name] = np.zeros((rows, width, *values.shape[1:]), dtype=values.dtype)
    return columns


def _place(
    columns: dict[str, NDArray[np.generic]], row: int, start: int, index: int, example: Example, share: Share
) -> int:
    end = start + example.tokens.size
    here = (row, slice(start, end))
    columns["tokens"][here] = example.tokens
    columns["position_ids"][here] = np.arange(example.tokens.size)
    columns["position_ids"][row, end:] = np.arange(columns["position_ids"].shape[1] - end)
    columns["sequence_ids"][here] = index
    columns["predictor_index"][row, start + 1 : end] = np.arange(start, end - 1)
    columns["loss_mask"][here] = example.loss_mask
    columns["weights"][here] = np.where(example.loss_mask, share.weight, 0.0)
    for name, values in example.per_token.items():
        columns[name][here] = values
    return end


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
