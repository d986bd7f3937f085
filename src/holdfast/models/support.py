"""The truncation of a distribution by top_k, top_p and min_p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Support:
    """Options that exclude tokens from sampling, applied in the order of the fields, as in transformers."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def restrict(self, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Return logits with tokens that are left out at minus infinity.

        Args:
            logits: [n, V], already divided by the temperature.
            drawn: [n] tokens that stay in whatever rounding says: they were drawn.
        """
        unrestricted = logits
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p < 1.0:
            ordered, order = logits.sort(-1, descending=True)
            probabilities = ordered.softmax(-1, dtype=torch.float64)
            before = probabilities.cumsum(-1) - probabilities
            out = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, before >= self.top_p)
            logits = logits.masked_fill(out, float("-inf"))
        if self.min_p > 0.0:
            probabilities = logits.softmax(-1)
            least = self.min_p * probabilities.amax(-1, keepdim=True)
            logits = logits.masked_fill(probabilities < least, float("-inf"))
        return logits if drawn is None else logits.scatter(1, drawn[:, None], unrestricted.gather(1, drawn[:, None]))
