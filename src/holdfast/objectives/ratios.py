"""Ratios of probabilities, kept finite: a difference of log-probabilities is bounded before it is exponentiated.

Losses see scored tokens only (`scored_tokens` gathers them), so nothing at a masked position reaches an exponential.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.objectives.base import Tokens

LIMIT = 20.0
"""Largest magnitude of a log ratio, in nats: e^20 is 5e8, which float32 still squares."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log ratio held within +-20 nats; beyond that its gradient is 0."""
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
    """Return [N]: for every token the sum over its sequence."""
    totals = torch.zeros(tokens.sequences, dtype=values.dtype, device=values.device)
    return totals.index_add(0, tokens.sequence, values)[tokens.sequence]


def sequence_lengths(tokens: Tokens, like: Tensor) -> Tensor:
    """Return [N]: for every token the number of scored tokens of its sequence."""
    return sequence_sum(torch.ones_like(like), tokens)


def sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Return [N]: for every token the mean over its sequence."""
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
