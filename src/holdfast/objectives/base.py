"""What a loss is: token terms that are summed with weights, and never divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.types import Batch, Scores


class Tokens(NamedTuple):
    """What a loss knows of the scored tokens besides their scores; slices along N like a tensor."""

    weights: Tensor
    """[N]"""
    per_token: Mapping[str, Tensor]
    """[N] each: advantages, sampler log-probabilities and whatever else packing carried"""
    sequence: Tensor
    """[N] int64, which sequence of the micro-batch the token belongs to; a sequence is never split over two"""
    sequences: int
    """Sequences of the micro-batch."""

    def part(self, start: int, end: int) -> Tokens:
        """Return tokens start..end-1."""
        return Tokens(
            self.weights[start:end],
            {name: values[start:end] for name, values in self.per_token.items()},
            self.sequence[start:end],
            self.sequences,
        )


def scored_tokens(batch: Batch) -> Tokens:
    """Gather a batch's per-token values at its scored positions."""
    return Tokens(
        batch.weights.flatten()[batch.scored],
        {name: values.flatten(0, 1)[batch.scored] for name, values in batch.per_token.items()},
        batch.sequence_ids.flatten()[batch.scored],
        len(batch.sample_ids),
    )


class Objective(Protocol):
    """A loss over scored tokens."""

    @property
    def separable(self) -> bool:
        """Whether a token's term depends on no other token's score, so that the head can form gradients at once."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the terms use the entropy of the policy."""
        ...

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        """Return the loss of each token, unweighted and differentiable in `logprobs` (and `entropy`).

        All tensors are [n]: a chunk of the scored tokens if `separable`, all of them otherwise.
        """
        ...

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return detached metrics as [2] tensors (total, denominator); the same names on every rank."""
        ...


def ratio(total: Tensor, denominator: Tensor | float) -> Tensor:
    """Return a metric as the [2] tensor (total, denominator), in float64 so that long sums keep their digits."""
    total = total.detach().to(torch.float64)
    return torch.stack([total, torch.as_tensor(denominator, dtype=torch.float64, device=total.device)])
