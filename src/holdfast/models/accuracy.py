"""The accuracy of a prediction where several tokens may have the largest logit."""

from __future__ import annotations

import torch
from torch import Tensor


def count_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of logits [n, V] and how many equal it, [n] each."""
    maximum = logits.amax(-1)
    # The exponentials would not do: those of two logits that are close enough are both 1.
    return maximum, (logits == maximum[:, None]).count_nonzero(-1)


def accuracy_of(logits: Tensor, maximum: Tensor, largest: Tensor) -> Tensor:
    """Return [n]: 1/n for a logit among n largest ones, 0 for any other, from what `count_largest` returns."""
    return torch.where(logits >= maximum, 1.0 / largest, 0.0)
