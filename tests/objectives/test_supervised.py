"""Supervised losses against NumPy, and every separable loss through both forms of the head."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.trainer_pt_utils import LabelSmoother

import holdfast.objectives
from holdfast.data.batches.packing import Share, pack
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import PACKED, register_attention
from holdfast.models.layers.family import family_of
from holdfast.objectives.base import Tokens, scored_tokens
from holdfast.objectives.supervised import (
    BothLikelihoods,
    DynamicFineTuning,
    NegativeLogLikelihood,
    SampledReverseKL,
    supervised_sums,
)
from holdfast.types import Batch, Example, LossSum, Scores
from tests.models.architectures import strong_model, twin

EXACT = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS, WEIGHTS = (9, 14, 5), (0.25, 1.0, 0.5)


@dataclass(frozen=True)
class ConfidencePenalty:
    """A user's loss: likelihood minus entropy, scaled by a value of each token."""

    separable: bool = True
    needs_entropy: bool = True

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        assert entropy is not None
        return -tokens.per_token["advantages"] * logprobs - 0.3 * entropy

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        return supervised_sums(scores, tokens)


@dataclass(frozen=True)
class WholeBatchVariance:
    """A user's loss that no chunk can compute alone: every term holds the mean over all tokens."""

    separable: bool = False
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:
        return (logprobs - logprobs.mean()).square()

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:
        return {}


SEPARABLE = [NegativeLogLikelihood(), DynamicFineTuning(), ConfidencePenalty(), SampledReverseKL(), BothLikelihoods()]


def tokens_of(weights: Tensor) -> Tokens:
    """Tokens of one sequence."""
    return Tokens(weights, {}, torch.zeros(weights.numel(), dtype=torch.int64), 1)


def draw_scores() -> tuple[np.ndarray[Any, Any], Tokens]:
    generator = np.random.default_rng(3)
    return -generator.exponential(2.0, 50), tokens_of(torch.ones(50, dtype=torch.float64))


def terms_and_slopes(objective: Any, logprobs: np.ndarray[Any, Any], tokens: Tokens) -> tuple[Tensor, Tensor]:
    live = torch.tensor(logprobs, requires_grad=True)
    terms = objective.token_terms(live, None, tokens)
    return terms.detach(), torch.autograd.grad(terms.sum(), live)[0]


def test_likelihood_is_minus_the_log_probability() -> None:
    logprobs, tokens = draw_scores()

    terms, slopes = terms_and_slopes(NegativeLogLikelihood(), logprobs, tokens)

    np.testing.assert_allclose(terms, -logprobs, rtol=1e-9)
    np.testing.assert_allclose(slopes, -np.ones(50), rtol=1e-9)


def test_dynamic_fine_tuning_has_the_gradient_of_minus_the_probability() -> None:
    logprobs, tokens = draw_scores()
    step = 1e-6
    numerical = (-np.exp(logprobs + step) + np.exp(logprobs - step)) / (2 * step)

    terms, slopes = terms_and_slopes(DynamicFineTuning(), logprobs, tokens)

    np.testing.assert_allclose(terms, -np.exp(logprobs) * logprobs, rtol=1e-9)
    np.testing.assert_allclose(slopes, -np.exp(logprobs), rtol=1e-9)
    np.testing.assert_allclose(slopes, numerical, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "objective", [NegativeLogLikelihood(), DynamicFineTuning()], ids=lambda each: type(each).__name__
)
def test_metrics_are_means_over_trained_tokens_whatever_their_weights(objective: Any) -> None:
    logprobs, _ = draw_scores()
    weights = torch.linspace(0, 5, 50, dtype=torch.float64)
    entropy = torch.linspace(0, 1, 50, dtype=torch.float64)
    scores = Scores(torch.tensor(logprobs), (torch.arange(50) % 5 == 0).float(), entropy)

    sums = objective.sums(scores, tokens_of(weights))

    means = {name: float(value[0] / value[1]) for name, value in sums.items()}
    assert means == pytest.approx({"nll": -logprobs.mean(), "mean_token_accuracy": 0.2, "entropy": 0.5}, rel=1e-9)
    assert {float(value[1]) for value in sums.values()} == {50.0}


def test_metrics_keep_their_digits_over_many_tokens() -> None:
    count = 3_000_000
    scores = Scores(torch.full((count,), -0.1), torch.ones(count), None)

    sums = NegativeLogLikelihood().sums(scores, tokens_of(torch.ones(count)))

    assert float(sums["nll"][0]) == pytest.approx(0.1 * count, rel=1e-7)
    assert float(sums["mean_token_accuracy"][0]) == count
    assert "entropy" not in sums


@pytest.fixture(scope="module")
def model() -> Any:
    return twin(strong_model("llama", scale=2.0), torch.float64)


def a_batch() -> Batch:
    generator = np.random.default_rng(1)
    examples = []
    for index, length in enumerate(LENGTHS):
        mask = generator.random(length) < 0.7
        mask[0] = False
        advantages = generator.normal(size=length)
        tokens = generator.integers(0, 96, length)
        carried = {"advantages": advantages, "teacher_logprobs": -generator.exponential(2.0, length)}
        examples.append(Example(index, index, tokens, mask, per_token=carried))
    return pack(examples, [Share(weight, 1.0) for weight in WEIGHTS], dtype=torch.float64)


def loss_and_gradients(model: Any, objective: Any) -> tuple[LossSum, dict[str, Tensor]]:
    register_attention()
    mine = twin(model)
    mine.set_attn_implementation(PACKED)
    family = family_of(mine)
    policy = PolicyModel(mine, family, family.head_spec(float32_product=False, chunk_tokens=5))
    result = policy(a_batch(), objective)
    assert isinstance(result, LossSum)
    result.loss.backward()
    return result, {name: value.grad for name, value in mine.named_parameters() if value.grad is not None}


def plain_loss(model: Any, objective: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Do the same with plain transformers, document by document, and autograd of the whole."""
    theirs, batch = twin(model), a_batch()
    logprobs, entropies = [], []
    for document in torch.split(batch.tokens[0], LENGTHS):
        full = theirs(input_ids=document[None]).logits[0].double().log_softmax(-1)[:-1]
        start = full.new_zeros(1)  # the first token, which nothing predicts
        logprobs.append(torch.cat([start, full.gather(1, document[1:, None]).squeeze(1)]))
        entropies.append(torch.cat([start, -(full.exp() * full).sum(-1)]))
    scored = batch.scored
    terms = objective.token_terms(torch.cat(logprobs)[scored], torch.cat(entropies)[scored], scored_tokens(batch))
    weights = torch.repeat_interleave(torch.tensor(WEIGHTS, dtype=torch.float64), torch.tensor(LENGTHS))
    loss = (terms * weights[scored]).sum()
    loss.backward()
    return loss, {name: value.grad for name, value in theirs.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("objective", SEPARABLE, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("separable", [True, False], ids=["one pass", "recomputed"])
def test_every_separable_loss_has_its_own_gradients_in_both_forms(model: Any, objective: Any, separable: bool) -> None:
    expected, gradients = plain_loss(model, objective)

    result, found = loss_and_gradients(model, replace(objective, separable=separable))

    assert_close(result.loss, expected, **EXACT)
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_smoothed_labels_are_those_of_transformers(model: Any) -> None:
    theirs, batch = twin(model), a_batch()
    logits = torch.cat([theirs(input_ids=each[None]).logits[0] for each in torch.split(batch.tokens[0], LENGTHS)])
    rows = torch.repeat_interleave(torch.tensor(WEIGHTS, dtype=torch.float64), torch.tensor(LENGTHS))[batch.scored]
    expected = torch.zeros((), dtype=torch.float64)
    for place, weight in zip(batch.scored.tolist(), rows, strict=True):
        # One token at a time: their mean over tokens knows no weights.
        output = {"logits": logits[None, place - 1 : place]}
        expected = expected + weight * LabelSmoother(epsilon=0.2)(output, batch.tokens[:, place : place + 1])
    expected.backward()

    result, found = loss_and_gradients(model, NegativeLogLikelihood(label_smoothing=0.2))

    # Their mean over the vocabulary is a sum in float32.
    assert_close(result.loss, expected, rtol=1e-6, atol=0)
    for name, value in theirs.named_parameters():
        assert_close(found[name], value.grad, rtol=1e-5, atol=1e-7)
    unsmoothed, _ = loss_and_gradients(model, NegativeLogLikelihood())
    assert_close(result.sums["nll"], unsmoothed.sums["nll"], **EXACT)
    assert abs(float((result.loss - unsmoothed.loss).detach())) > 0.01


def test_a_loss_of_the_users_own_may_depend_on_all_tokens_at_once(model: Any) -> None:
    expected, gradients = plain_loss(model, WholeBatchVariance())

    result, found = loss_and_gradients(model, WholeBatchVariance())

    assert_close(result.loss, expected, **EXACT)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, **EXACT)
    assert not result.scores.logprobs.requires_grad


def test_every_separable_loss_of_the_package_is_tried_in_both_forms() -> None:
    found = set()
    for module in pkgutil.iter_modules(holdfast.objectives.__path__, "holdfast.objectives."):
        for _, made in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if getattr(made, "separable", False) is True:
                found.add(made.__name__)

    assert found <= {type(objective).__name__ for objective in SEPARABLE}
