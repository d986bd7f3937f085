"""Losses on preferences against NumPy: values and gradients, metrics, idle ranks, order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config.sections.preference import PreferenceConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.objectives.base import Objective, Tokens
from holdfast.objectives.preference import KTO, PairedPreference
from holdfast.training.run import ConfiguredRun
from holdfast.training.setup.losses import preference_objective
from holdfast.types import Scores
from tests.objectives.cases import means
from tests.oracle import preference as oracle
from tests.oracle.policy import Array

LENGTHS = (7, 3, 1, 12, 5, 5, 20, 2)
"""Of four pairs, the chosen answer first."""


class Drawn(NamedTuple):
    logprobs: Array
    reference: Array
    sequence: Array


def draw(seed: int = 0, spread: float = 0.4) -> Drawn:
    generator = np.random.default_rng(seed)
    size = sum(LENGTHS)
    logprobs = -generator.exponential(1.5, size) - 0.02
    return Drawn(logprobs, logprobs + spread * generator.normal(size=size), np.repeat(np.arange(len(LENGTHS)), LENGTHS))


def tokens_of(case: Drawn, dtype: torch.dtype = torch.float64, **more: Tensor) -> Tokens:
    carried = {"reference_logprobs": torch.tensor(case.reference, dtype=dtype), **more}
    weights = torch.ones(case.sequence.size, dtype=dtype)
    return Tokens(weights, carried, torch.tensor(case.sequence), len(LENGTHS))


def found(objective: Objective, case: Drawn, tokens: Tokens) -> tuple[Array, Array]:
    """Return terms and the gradient of their sum."""
    live = torch.tensor(case.logprobs, requires_grad=True)
    terms = objective.token_terms(live, None, tokens)
    (gradient,) = torch.autograd.grad((terms * tokens.weights).sum(), live)
    return terms.detach().numpy(), gradient.numpy()


def expected(loss: oracle.Loss, case: Drawn) -> tuple[Array, Array]:
    """Return the loss of each pair, and the gradient of their sum by each token's log-probability."""
    answers = []
    for index, length in enumerate(LENGTHS):
        mine = case.sequence == index
        ratio = float((case.logprobs[mine] - case.reference[mine]).sum())
        answers.append(oracle.Answer(ratio, float(case.logprobs[mine].mean()), length))
    values, gradient = [], np.zeros_like(case.logprobs)
    for first in range(0, len(LENGTHS), 2):
        value, *slopes = loss(answers[first], answers[first + 1])
        values.append(value)
        for side in (0, 1):
            index = first + side
            gradient[case.sequence == index] = slopes[side] + slopes[2 + side] / LENGTHS[index]
    return np.array(values), gradient


def made(sft: float = 0.0, *losses: dict[str, Any]) -> Objective:
    section = PreferenceConfig.model_validate({"loss": list(losses), "sft": sft})
    return preference_objective(section, ConfiguredRun(config=SFTConfig.model_construct(), base=Path()))


LOSSES: dict[str, tuple[Objective, oracle.Loss]] = {
    "dpo": (made(0.0, {"beta": 0.3}), oracle.dpo(0.3)),
    "conservative": (made(0.0, {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.2}), oracle.dpo(0.3, 0.2)),
    "normalised": (made(0.0, {"kind": "dpo", "beta": 2.0, "lengths": "mean"}), oracle.dpo(2.0, mean=True)),
    "robust": (made(0.0, {"kind": "robust", "beta": 0.3, "label_smoothing": 0.2}), oracle.robust(0.3, 0.2)),
    "ipo": (made(0.0, {"kind": "ipo", "beta": 0.3}), oracle.ipo(0.3)),
    "ipo, mean": (made(0.0, {"kind": "ipo", "beta": 0.3, "lengths": "mean"}), oracle.ipo(0.3, mean=True)),
    "hinge": (made(0.0, {"kind": "hinge", "beta": 0.3}), oracle.hinge(0.3)),
    "apo_zero": (made(0.0, {"kind": "apo_zero", "beta": 0.3}), oracle.apo_zero(0.3)),
    "apo_down": (made(0.0, {"kind": "apo_down", "beta": 0.3}), oracle.apo_down(0.3)),
    "simpo": (made(0.0, {"kind": "simpo", "beta": 2.5, "gamma": 0.7}), oracle.simpo(2.5, 0.7)),
    "orpo": (made(0.0, {"kind": "orpo", "beta": 0.4}), oracle.orpo(0.4)),
    "rpo": (made(0.5, {"beta": 0.3}), oracle.summed((1.0, oracle.dpo(0.3)), sft=0.5)),
    "several": (
        made(0.1, {"kind": "ipo", "weight": 0.2}, {"kind": "simpo", "weight": 3.0}, {"kind": "apo_zero"}),
        oracle.summed((0.2, oracle.ipo(0.1)), (3.0, oracle.simpo(2.0, 1.0)), (1.0, oracle.apo_zero(0.1)), sft=0.1),
    ),
}
each_loss = pytest.mark.parametrize(("objective", "by_hand"), LOSSES.values(), ids=LOSSES)


@each_loss
@pytest.mark.parametrize("spread", [0.05, 0.4, 3.0])
def test_every_loss_and_its_gradient_are_those_by_hand(
    objective: Objective, by_hand: oracle.Loss, spread: float
) -> None:
    case = draw(spread=spread)

    terms, gradient = found(objective, case, tokens_of(case))

    values, slopes = expected(by_hand, case)
    np.testing.assert_allclose(terms.sum(), values.sum(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-10, atol=1e-10)
    assert not objective.separable


@each_loss
def test_a_loss_stands_once_at_the_first_token_of_the_chosen_answer(objective: Objective, by_hand: oracle.Loss) -> None:
    case = draw()

    terms, _ = found(objective, case, tokens_of(case))

    starts = np.cumsum([0, *LENGTHS])[:-1:2]
    np.testing.assert_allclose(terms[starts], expected(by_hand, case)[0], rtol=1e-10)
    assert not terms[np.setdiff1d(np.arange(terms.size), starts)].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_policy_and_reference_agree_margins_are_0_and_the_loss_is_ln_2(dtype: torch.dtype) -> None:
    case = draw(spread=0.0)
    logprobs = torch.tensor(case.logprobs, dtype=dtype)
    objective, tokens = LOSSES["dpo"][0], tokens_of(case, dtype)

    loss = objective.token_terms(logprobs, None, tokens)
    shown = means(objective.sums(Scores(logprobs, logprobs > 0, None), tokens))

    assert loss.sum().item() == 4 * math.log(2)
    assert shown["rewards/margins"] == shown["rewards/chosen"] == shown["rewards/accuracies"] == 0.0


def test_metrics_are_means_over_pairs() -> None:
    case = draw()
    objective, by_hand = LOSSES["several"]
    logprobs = torch.tensor(case.logprobs)

    shown = means(objective.sums(Scores(logprobs, logprobs > 0, torch.ones_like(logprobs)), tokens_of(case)))

    sums = np.array([case.logprobs[case.sequence == index].sum() for index in range(8)])
    ratios = np.array([(case.logprobs - case.reference)[case.sequence == index].sum() for index in range(8)])
    rewards = 0.1 * ratios
    assert shown["logps/chosen"] == pytest.approx(sums[::2].mean())
    assert shown["logps/rejected"] == pytest.approx(sums[1::2].mean())
    assert shown["rewards/chosen"] == pytest.approx(rewards[::2].mean())
    assert shown["rewards/margins"] == pytest.approx((rewards[::2] - rewards[1::2]).mean())
    assert shown["rewards/accuracies"] == np.mean(ratios[::2] > ratios[1::2])
    assert shown["nll_loss"] == pytest.approx(-np.mean(sums[::2] / np.array(LENGTHS[::2])))
    assert shown["entropy"] == 1.0
    parts = 0.2 * shown["loss/ipo"] + 3 * shown["loss/simpo"] + shown["loss/apo_zero"] + 0.1 * shown["nll_loss"]
    assert parts == pytest.approx(expected(by_hand, case)[0].mean())


def test_a_reference_as_sums_is_a_reference_as_tokens() -> None:
    """What was computed before the run stands at the first token of each answer."""
    case = draw()
    summed = np.zeros_like(case.reference)
    for index in range(8):
        mine = np.flatnonzero(case.sequence == index)
        summed[mine[0]] = case.reference[mine].sum()

    for objective, _ in LOSSES.values():
        whole, before = (found(objective, each, tokens_of(each)) for each in (case, case._replace(reference=summed)))
        np.testing.assert_allclose(before[0], whole[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(before[1], whole[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", [*(pair[0] for pair in LOSSES.values()), KTO(0.1)], ids=[*LOSSES, "kto"])
def test_a_rank_without_work_takes_part(objective: Objective) -> None:
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(torch.zeros(0), {}, torch.zeros(0, dtype=torch.int64), 0)

    terms = objective.token_terms(nothing, None, tokens)
    sums = objective.sums(Scores(nothing.detach(), nothing.detach() > 0, None), tokens)

    terms.sum().backward()
    assert terms.numel() == 0
    assert all(value.tolist() == [0.0, 0.0] for value in sums.values())


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    case = draw()._replace(logprobs=np.zeros(sum(LENGTHS)))

    terms, gradient = found(LOSSES["orpo"][0], case, tokens_of(case))

    assert np.isfinite(terms).all()
    assert np.isfinite(gradient).all()


def test_a_loss_that_compares_says_what_it_lacks() -> None:
    case = draw()
    bare = tokens_of(case)._replace(per_token={})

    with pytest.raises(ValueError, match="this batch carries no reference_logprobs"):
        found(LOSSES["dpo"][0], case, bare)
    terms, _ = found(LOSSES["orpo"][0], case, bare)
    assert np.isfinite(terms).all()


def kto_case(z0: float) -> tuple[Drawn, Tokens, Array]:
    case = draw()
    desirable = np.array([True, False, False, True, True, True, False, False])
    more = {
        "desirable": torch.tensor(desirable[case.sequence]),
        "kl": torch.full((case.sequence.size,), z0, dtype=torch.float64),
    }
    return case, tokens_of(case, **more), desirable


@pytest.mark.parametrize("z0", [0.0, 1.3])
def test_kto_and_its_gradient_are_those_by_hand(z0: float) -> None:
    case, tokens, desirable = kto_case(z0)

    terms, gradient = found(KTO(0.3, 1.5, 0.8, sft=0.2), case, tokens)

    starts = np.cumsum([0, *LENGTHS])[:-1]
    for index in range(8):
        mine = case.sequence == index
        r = float((case.logprobs - case.reference)[mine].sum())
        value, slope = oracle.kto(0.3, z0, bool(desirable[index]), 1.5 if desirable[index] else 0.8, r)
        sft = 0.2 if desirable[index] else 0.0
        value -= sft * float(case.logprobs[mine].mean())
        np.testing.assert_allclose(terms[starts[index]], value, rtol=1e-10)
        np.testing.assert_allclose(gradient[mine], slope - sft / LENGTHS[index], rtol=1e-10, atol=1e-12)


def test_metrics_of_kto_are_means_over_each_side() -> None:
    case, tokens, desirable = kto_case(1.3)
    logprobs = torch.tensor(case.logprobs)

    shown = means(KTO(0.3).sums(Scores(logprobs, logprobs > 0, None), tokens))

    ratios = np.array([(case.logprobs - case.reference)[case.sequence == index].sum() for index in range(8)])
    assert shown["rewards/chosen"] == pytest.approx(0.3 * ratios[desirable].mean())
    assert shown["rewards/rejected"] == pytest.approx(0.3 * ratios[~desirable].mean())
    assert shown["kto/kl"] == pytest.approx(1.3)
    assert shown["kto/desirable"] == 0.5
    assert shown["rewards/accuracies"] == np.mean((ratios > 1.3) == desirable)


def test_the_objective_of_a_section_knows_whether_it_needs_a_reference() -> None:
    assert isinstance(LOSSES["several"][0], PairedPreference)
    needs = {name: pair[0].needs_reference for name, pair in LOSSES.items()}  # type: ignore[attr-defined]
    assert [name for name, needed in needs.items() if not needed] == ["simpo", "orpo"]
