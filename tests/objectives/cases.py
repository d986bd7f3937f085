"""Scored tokens to try losses on, and the two sides of every comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.objectives.base import Tokens
from holdfast.objectives.surrogates import Actions
from holdfast.types import Scores
from tests.oracle.policy import Array, Case

LENGTHS = (13, 20, 7, 1, 9)


def draw(seed: int = 0, *, spread: float = 0.3, on_policy: bool = False, flat: bool = False) -> Case:
    """Draw tokens of five sequences.

    Args:
        seed: Of everything.
        spread: Standard deviation of each difference of log-probabilities, in nats.
        on_policy: Leave proximal log-probabilities out.
        flat: Give all tokens of a sequence one advantage.
    """
    generator = np.random.default_rng(seed)
    size = sum(LENGTHS)
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    logprobs = -generator.exponential(2.0, size) - 0.05
    moved = [logprobs + spread * generator.normal(size=size) for _ in range(3)]
    advantages = generator.normal(size=len(LENGTHS))[sequence] if flat else generator.normal(size=size)
    return Case(
        logprobs=logprobs,
        proximal=None if on_policy else moved[0],
        advantages=advantages,
        sequence=sequence,
        weights=generator.uniform(0.1, 2.0, size),
        sampler=moved[1],
        reference=moved[2],
        entropy=generator.exponential(1.0, size),
        entropy_mask=generator.random(size) < 0.4,
    )


def tokens_of(case: Case, dtype: torch.dtype = torch.float64) -> Tokens:
    carried = {
        "advantages": case.advantages,
        "sampler_logprobs": case.sampler,
        "reference_logprobs": case.reference,
    } | ({} if case.proximal is None else {"proximal_logprobs": case.proximal})
    return Tokens(
        torch.tensor(case.weights, dtype=dtype),
        {name: torch.tensor(values, dtype=dtype) for name, values in carried.items()}
        | {"entropy_mask": torch.tensor(case.entropy_mask), "covariance_mask": torch.tensor(~case.entropy_mask)},
        torch.tensor(case.sequence),
        len(LENGTHS),
    )


def actions_of(case: Case, logprobs: Tensor) -> Actions:
    proximal = logprobs.detach() if case.proximal is None else torch.tensor(case.proximal)
    return Actions(logprobs, logprobs - proximal, torch.tensor(case.advantages), tokens_of(case))


def scores_of(case: Case) -> Scores:
    logprobs = torch.tensor(case.logprobs)
    return Scores(logprobs, torch.zeros_like(logprobs), torch.tensor(case.entropy))


def surrogate_found(surrogate: Any, case: Case) -> tuple[Array, Array]:
    """Return terms and the gradient of their weighted sum, as the oracle gives them."""
    live = torch.tensor(case.logprobs, requires_grad=True)
    terms = surrogate.terms(actions_of(case, live))
    (gradient,) = torch.autograd.grad((terms * torch.tensor(case.weights)).sum(), live)
    return terms.detach().numpy(), gradient.numpy()


def objective_found(objective: Any, case: Case) -> tuple[Array, Array, Array]:
    """Return terms and the gradients of their weighted sum by log-probabilities and by entropies."""
    live = torch.tensor(case.logprobs, requires_grad=True)
    entropy = torch.tensor(case.entropy, requires_grad=True)
    terms = objective.token_terms(live, entropy if objective.needs_entropy else None, tokens_of(case))
    total = (terms * torch.tensor(case.weights)).sum()
    by_logprob, by_entropy = torch.autograd.grad(total, (live, entropy), allow_unused=True)
    return (
        terms.detach().numpy(),
        by_logprob.numpy(),
        np.zeros_like(case.entropy) if by_entropy is None else by_entropy.numpy(),
    )


def means(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(total / count) if count else 0.0 for name, (total, count) in sums.items()}
