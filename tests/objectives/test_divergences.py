"""Generalised Jensen-Shannon divergence: its values, its derivative, and what it becomes at both ends of beta."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from holdfast.objectives.base import Tokens
from holdfast.objectives.supervised import SampledReverseKL, generalised_jsd
from tests.oracle import distillation as oracle

TOKENS, VOCABULARY = 7, 19
TEACHER, STUDENT = [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]


def drawn(seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64) * scale


@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_values_and_derivatives_are_those_of_the_definition(beta: float) -> None:
    logits, teacher = drawn(1).requires_grad_(), drawn(2).log_softmax(-1)
    expected = oracle.jsd(teacher, logits.log_softmax(-1), beta)
    (derivative,) = torch.autograd.grad(expected.sum(), logits)

    found = generalised_jsd(logits.detach().log_softmax(-1), teacher.clone(), beta)

    assert_close(found.values, expected.detach(), rtol=1e-10, atol=1e-12)
    assert_close(found.by_logits, derivative, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.25, 0.5, 0.75])
def test_three_words_by_hand(beta: float) -> None:
    student, teacher = (torch.tensor([row], dtype=torch.float64).log() for row in (STUDENT, TEACHER))

    found = generalised_jsd(student, teacher, beta)

    assert float(found.values) == pytest.approx(oracle.by_counting(TEACHER, STUDENT, beta), abs=1e-15)


def test_the_ends_are_both_divergences_of_kullback_and_leibler() -> None:
    student, teacher = (torch.tensor([row], dtype=torch.float64).log() for row in (STUDENT, TEACHER))
    forward = 0.5 * math.log(4) + 0.25 * math.log(2) + 0.25 * math.log(1 / 3)
    reverse = 0.125 * math.log(1 / 4) + 0.125 * math.log(1 / 2) + 0.75 * math.log(3)

    ends = [float(generalised_jsd(student, teacher.clone(), beta).values) for beta in (0.0, 1.0)]

    assert ends == pytest.approx([forward, reverse], abs=1e-15)


@pytest.mark.parametrize(("near", "end"), [(1e-7, 0.0), (1 - 1e-7, 1.0)])
def test_near_an_end_the_divergence_over_the_distance_to_it_is_the_end(near: float, end: float) -> None:
    student, teacher = drawn(1).log_softmax(-1), drawn(2).log_softmax(-1)
    distance = abs(near - end)

    close = generalised_jsd(student, teacher.clone(), near)
    limit = generalised_jsd(student, teacher.clone(), end)

    assert_close(close.values / distance, limit.values, rtol=1e-4, atol=1e-6)
    assert_close(close.by_logits / distance, limit.by_logits, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(beta: float) -> None:
    same = drawn(1).log_softmax(-1)

    found = generalised_jsd(same, same.clone(), beta)

    assert_close(found.values, torch.zeros(TOKENS, dtype=torch.float64), rtol=0, atol=1e-15)
    assert_close(found.by_logits, torch.zeros_like(same), rtol=0, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_certain_predictions_of_float32_stay_finite(beta: float) -> None:
    certain = torch.tensor([[300.0, 0.0, -300.0], [0.0, 300.0, -300.0]])

    found = generalised_jsd(certain.log_softmax(-1), certain.flip(0).log_softmax(-1), beta)

    assert found.values.tolist() == pytest.approx([math.log(2) if beta == 0.5 else 300.0] * 2, rel=1e-6)
    assert torch.isfinite(found.by_logits).all()


def test_the_sampled_form_has_the_gradient_of_the_whole_on_average() -> None:
    """Summed over all tokens by the student's own probability, the estimate is the divergence, its gradient too."""
    logits, teacher = drawn(1)[0].requires_grad_(), drawn(2)[0].log_softmax(-1)
    expected = oracle.kl(logits.log_softmax(-1), teacher)
    (derivative,) = torch.autograd.grad(expected, logits)
    chances = logits.detach().softmax(-1)
    tokens = Tokens(
        torch.ones(VOCABULARY), {"teacher_logprobs": teacher}, torch.zeros(VOCABULARY, dtype=torch.int64), 1
    )

    terms = SampledReverseKL().token_terms(logits.log_softmax(-1), None, tokens)
    (found,) = torch.autograd.grad((terms * chances).sum(), logits)

    assert_close((terms * chances).sum().detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    assert_close(found, derivative, rtol=1e-10, atol=1e-12)
