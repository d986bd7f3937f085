"""The protocol of a loss: it returns a term per token; terms are summed with weights and never divided.

Differences of log-probabilities are bounded before they are exponentiated, so that ratios stay finite. Losses receive
scored tokens only (`scored_tokens` gathers them), so that values at masked positions never reach an exponential.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.types import Batch, Scores


class Tokens(NamedTuple):
    """The weights, columns and sequences of the N scored tokens of a micro-batch."""

    weights: Tensor
    """[N] weight of each token in the loss"""
    per_token: Mapping[str, Tensor]
    """[N] each: columns of the batch by name, e.g. `advantages`, `sampler_logprobs`, `reference_logprobs`"""
    sequence: Tensor
    """[N] int64, index of the token's sequence in the micro-batch, ascending; a micro-batch holds whole sequences"""
    sequences: int
    """Number of sequences of the micro-batch."""

    def part(self, start: int, end: int) -> Tokens:
        """Return a range of the tokens.

        Args:
            start: Index of the first token.
            end: Index behind the last token.
        """
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
    """The protocol of a loss over scored tokens."""

    @property
    def separable(self) -> bool:
        """Whether a token's term depends on no other token's score, so that the head can form gradients at once."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the terms use the entropy of the policy."""

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        """Return the loss of each token, unweighted and differentiable in `logprobs` (and `entropy`).

        Args:
            logprobs: [n] log-probabilities in nats. n is a chunk of the scored tokens if `separable`, else all of them.
            entropy: [n] entropies in nats; None unless `needs_entropy`.
            tokens: Weights and columns of the same n tokens.

        Returns:
            [n] terms. Weights and the division are applied later.
        """

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        """Return detached metrics of a micro-batch.

        Args:
            scores: Scores of all N scored tokens.
            tokens: Weights and columns of the same tokens.

        Returns:
            [2] tensors (total, denominator) by name, as `ratio` makes them; the same names on every rank.
        """


def ratio(total: Tensor, denominator: Tensor | float) -> Tensor:
    """Return a metric as the [2] tensor (total, denominator), in float64 so that long sums keep their digits.

    Args:
        total: [] sum over the tokens of a micro-batch; it is detached.
        denominator: Number of tokens, or another sum, that the total is divided by after both are summed over ranks.
    """
    total = total.detach().to(torch.float64)
    return torch.stack([total, torch.as_tensor(denominator, dtype=torch.float64, device=total.device)])


LIMIT = 20.0
"""Largest magnitude of a log ratio, in nats: e^20 is 5e8, which float32 still squares."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log ratio held within +-20 nats; beyond that its gradient is 0.

    Args:
        log_ratio: Differences of log-probabilities, in nats, of any shape.
    """
    return log_ratio.clamp(-LIMIT, LIMIT).exp()


def log_ratio_to_proximal(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return [N] log policy - log proximal policy, differentiable in `logprobs`.

    Without proximal log-probabilities the update is the first of its rollout, and the proximal policy is the policy:
    the result is exactly 0, with gradient 1.
    """
    return logprobs - proximal_logprobs(logprobs, tokens)


def proximal_logprobs(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return [N] log-probabilities of the trainer before the first update of this rollout, detached."""
    if "proximal_logprobs" in tokens.per_token:
        return carried("proximal_logprobs", logprobs, tokens)
    return logprobs.detach()


def carried(name: str, logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return [N] values that packing carried along, in the dtype of the log-probabilities.

    A rank without work has a batch that carries nothing; it gets no values.

    Raises:
        ValueError: There are tokens, but not this value.
    """
    if name in tokens.per_token:
        return tokens.per_token[name].to(logprobs.dtype)
    if logprobs.numel() == 0:
        return logprobs.detach()
    names = ", ".join(sorted(tokens.per_token)) or "nothing"
    raise ValueError(f"the objective needs {name} of every token; this batch carries {names}")


def sequence_sum(values: Tensor, tokens: Tokens) -> Tensor:
    """Return [N]: for every token the sum over its sequence.

    Args:
        values: [N] a number for each scored token.
        tokens: All scored tokens of the micro-batch, not a chunk.
    """
    totals = torch.zeros(tokens.sequences, dtype=values.dtype, device=values.device)
    return totals.index_add(0, tokens.sequence, values)[tokens.sequence]


def sequence_lengths(tokens: Tokens, like: Tensor) -> Tensor:
    """Return [N]: for every token the number of scored tokens of its sequence.

    Args:
        tokens: All scored tokens of the micro-batch, not a chunk.
        like: [N] tensor whose dtype and device the result has.
    """
    return sequence_sum(torch.ones_like(like), tokens)


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Return [N]: for every token the mean over its sequence.

    Args:
        values: [N] a number for each scored token.
        tokens: All scored tokens of the micro-batch, not a chunk.
    """
    return sequence_sum(values, tokens) / sequence_lengths(tokens, values)


def sum_to_go(values: Tensor, tokens: Tokens) -> Tensor:
    """Return [N]: for every token the sum over itself and the later tokens of its sequence.

    Sequences follow each other in the order of their indices, as packing lays them.
    """
    wide = values.to(torch.float64)
    to_end = wide.flip(0).cumsum(0).flip(0)
    totals = torch.zeros(tokens.sequences, dtype=wide.dtype, device=wide.device).index_add(0, tokens.sequence, wide)
    of_later = totals.flip(0).cumsum(0).flip(0) - totals
    return (to_end - of_later[tokens.sequence]).to(values.dtype)
