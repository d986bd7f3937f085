"""The loss of a critic: squared error to returns, held near the values it had before the first update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens, carried, ratio
from holdfast.types import Scores


@dataclass(frozen=True)
class ValueLoss:
    """1/2 max((v - R)^2, (clip(v, V - c, V + c) - R)^2), the policy's pessimism applied to values.

    The error is that of Schulman et al., "Proximal Policy Optimization" (arXiv:1707.06347), eq. 9; the bound is their
    code's. Of `tokens.per_token` it reads `returns` R and, with a bound, `values` V.

    Args:
        clip: c; None: no bound.
    """

    clip: float | None = None
    separable: bool = False
    """No head makes values, so there are no logits to go through in chunks."""
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        """Return [n] terms; `logprobs` are the critic's values."""
        plain, bounded = self._errors(logprobs, tokens)
        return torch.maximum(plain, bounded) / 2

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return the share of values that the bound holds, where there is one."""
        if self.clip is None:
            return {}
        plain, bounded = self._errors(scores.logprobs, tokens)
        return {"clip_fraction": ratio((bounded > plain).sum(), float(plain.numel()))}

    def _errors(self, values: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return [n] squared errors of the values, and of the values within the bound."""
        returns = carried("returns", values, tokens)
        plain = (values - returns).square()
        if self.clip is None:
            return plain, plain
        before = carried("values", values, tokens)
        # Not before + clamp(values - before): within the bound that is the value but for rounding, which would count.
        return plain, (values.clamp(before - self.clip, before + self.clip) - returns).square()
