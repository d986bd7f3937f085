"""Weights and counts, which define the average of a loss (`data.average`).

A loss is `sum(token loss * weight) / sum(count)`, both sums over all ranks and micro-batches of an update. Each average
below is a choice of the two numbers, so no result depends on how tokens were split over ranks, micro-batches or packs.
A sequence without a trained token has weight 0 and count 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.config.sections.data import Average, PairAverage


@dataclass(frozen=True)
class Share:
    """The weight of a sequence's tokens and its contribution to the denominator."""

    weight: float
    """Factor of the loss of each of its trained tokens."""
    count: float
    """Contribution to the denominator."""


def shares(
    average: Average | PairAverage, trained_tokens: Sequence[int], prompt_ids: Sequence[int], max_length: int
) -> list[Share]:
    """Return the share of every sequence of an update.

    - token_mean: the mean over trained tokens (DAPO, arXiv:2503.14476, eq. 8).
    - sequence_mean: the mean over sequences of their token means (GRPO, arXiv:2402.03300, eq. 3).
    - constant_length: the mean over sequences of their token sums divided by `max_length`, one constant for the whole
      run (Dr. GRPO, arXiv:2503.20783, section 3.2).
    - prompt_mean: the mean over prompts of the token mean over all sequences of a prompt.
    - pair_mean: the mean over prompts of the token sum over all sequences of a prompt. For losses that sum to one
      number per prompt, which is what losses of pairs do.

    Args:
        average: Which of them.
        trained_tokens: Trained tokens of each sequence of the whole update, over all ranks.
        prompt_ids: Prompt of each sequence.
        max_length: The constant of `constant_length`.
    """
    trained = np.asarray(trained_tokens, dtype=np.int64)
    match average:
        case "token_mean":
            pairs = [(1.0, float(tokens)) for tokens in trained]
        case "sequence_mean":
            pairs = [(1.0 / max(tokens, 1), 1.0) for tokens in trained]
        case "constant_length":
            pairs = [(1.0 / max_length, 1.0) for _ in trained]
        case "prompt_mean":
            _, prompt = np.unique(np.asarray(prompt_ids), return_inverse=True)
            per_prompt = np.maximum(np.bincount(prompt, weights=trained), 1.0)[prompt]
            pairs = [
                (float(1.0 / total), float(tokens / total)) for tokens, total in zip(trained, per_prompt, strict=True)
            ]
        case "pair_mean":
            pairs = _once_per_prompt(prompt_ids)
    return [
        Share(weight, count) if tokens > 0 else Share(0.0, 0.0)
        for (weight, count), tokens in zip(pairs, trained, strict=True)
    ]


def _once_per_prompt(prompt_ids: Sequence[int]) -> list[tuple[float, float]]:
    """Return weight 1 for all, and counts that sum to 1 over the sequences of each prompt, the same for each."""
    _, prompt, sequences = np.unique(np.asarray(prompt_ids), return_inverse=True, return_counts=True)
    return [(1.0, float(1.0 / of_prompt)) for of_prompt in sequences[prompt]]
