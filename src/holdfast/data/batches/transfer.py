"""Change the tensors of batches, such as for their way to a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.types import Batch, MiniBatch


def with_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with each of its tensors changed."""
    changed: dict[str, Any] = {
        field.name: change(value) for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)
    }
    for name in ("per_token", "model_inputs"):
        changed[name] = {key: change(value) for key, value in getattr(batch, name).items()}
    return replace(batch, **changed)


def pinned(mini_batch: MiniBatch, device: torch.device) -> MiniBatch:
    """Return a mini-batch that a GPU copies while the host goes on; for another device it stays as it is."""
    if device.type != "cuda":
        return mini_batch
    with torch.cuda.device(device):  # a thread begins on device 0, and pinning memory would open a context there
        batches = tuple(with_tensors(batch, Tensor.pin_memory) for batch in mini_batch.micro_batches)
    return replace(mini_batch, micro_batches=batches)
