"""Whole answers of a micro-batch: what their tokens' log-probabilities come to.

Sums are float64. A log-probability of a thousand tokens has few digits left in float32, and losses take differences of
such sums; the difference to the reference is taken token by token, so that it is exactly 0 where both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens


@dataclass(frozen=True)
class Answers:
    """Answers side by side, [S] each, float64; differentiable in the policy's log-probabilities."""

    logps: Tensor
    """Log-probability of the answer under the policy: the sum over its trained tokens."""
    log_ratios: Tensor
    """The same less the reference's; `logps` where there is no reference."""
    lengths: Tensor
    """Trained tokens."""

    @property
    def mean_logps(self) -> Tensor:
        """Log-probability per token: the logarithm of the geometric mean of the tokens' probabilities."""
        return self.logps / self.lengths

    def every(self, step: int, first: int = 0) -> Answers:
        """Return the answers first, first + step, first + 2 step and so on."""
        return Answers(self.logps[first::step], self.log_ratios[first::step], self.lengths[first::step])


def answers_of(logprobs: Tensor, tokens: Tokens, *, compared: bool) -> Answers:
    """Sum up the sequences of a micro-batch.

    Args:
        logprobs: [N], of the policy.
        tokens: Their surroundings; with `compared`, they carry `reference_logprobs`.
        compared: Whether there is a reference.

    Raises:
        ValueError: There are tokens without `reference_logprobs`.
    """
    wide = logprobs.to(torch.float64)
    total = torch.zeros(tokens.sequences, dtype=torch.float64, device=logprobs.device)
    logps = total.index_add(0, tokens.sequence, wide)
    lengths = total.index_add(0, tokens.sequence, torch.ones_like(wide))
    if not compared:
        return Answers(logps, logps, lengths)
    if "reference_logprobs" not in tokens.per_token and wide.numel():
        raise ValueError("the objective compares with a reference; this batch carries no reference_logprobs")
    reference = tokens.per_token.get("reference_logprobs", wide.detach()).to(torch.float64)
    return Answers(logps, total.index_add(0, tokens.sequence, wide - reference), lengths)


def first_tokens(tokens: Tokens) -> Tensor:
    """Return [S]: which scored token is the first of each sequence.

    Sequences follow each other in the order of their indices, as packing lays them, and each has a scored token.
    """
    return torch.searchsorted(tokens.sequence, torch.arange(tokens.sequences, device=tokens.sequence.device))


def of_sequences(name: str, tokens: Tokens) -> Tensor:
    """Return [S]: what every token of a sequence carries alike; nothing where nobody carries anything."""
    values = tokens.per_token.get(name)
    return tokens.weights.new_zeros(0) if values is None else values[first_tokens(tokens)]


def at_first_tokens(values: Tensor, tokens: Tokens, step: int = 1) -> Tensor:
    """Return [N] terms that are 0 but for the first token of every step-th sequence, which has its value."""
    places = first_tokens(tokens)[::step]
    return values.new_zeros(tokens.weights.numel()).index_add(0, places, values)
