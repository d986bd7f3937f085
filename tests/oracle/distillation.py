"""Divergences of whole distributions as their papers write them, by autograd, with nothing shared with the code.

Every tensor of log-probabilities is [..., V]; results are [...].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p, q) of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


def jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Return D_JSD(beta) of GKD (arXiv:2306.13649, section 2); the limits of Kullback and Leibler at 0 and 1."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def losses(  # noqa: PLR0913 - what a term is made of
    student: Tensor, teacher: Tensor, targets: Tensor, beta: float, temperature: float = 1.0, sft: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the term of each token and its divergence, from logits [N, V] of both over the same columns."""
    divergence = jsd((teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1), beta)
    likelihood = student.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return divergence - sft * likelihood, divergence


def by_counting(teacher: list[float], student: list[float], beta: float) -> float:
    """Return D_JSD(beta) of two small distributions, a sum at a time, in Python's own floats."""
    mixture = [beta * p + (1 - beta) * q for p, q in zip(teacher, student, strict=True)]
    one = sum(p * math.log(p / m) for p, m in zip(teacher, mixture, strict=True))
    two = sum(q * math.log(q / m) for q, m in zip(student, mixture, strict=True))
    return beta * one + (1 - beta) * two


def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits [L - 1, V] that predict tokens 1..L-1 of one sequence, by transformers' own forward."""
    logits: Tensor = model(input_ids=tokens[None]).logits[0, :-1]
    return logits
