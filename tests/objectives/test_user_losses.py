"""LUSPO, GMPO and VESPO, each one file that nothing but its path names: what a user's own loss can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.testing import assert_close

from holdfast.config.sections.algorithm import UserObjectiveConfig
from holdfast.config.sections.policy import KLConfig, PolicyObjective
from holdfast.objectives.base import Tokens
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.training.observe import load_function
from holdfast.types import Scores
from tests.models.architectures import strong_model, twin
from tests.objectives.cases import draw, means, objective_found, scores_of, tokens_of
from tests.objectives.heads import a_batch, through_our_head, through_transformers
from tests.oracle import policy as oracle
from tests.oracle.policy import Case, Found

LOSSES = Path(__file__).parents[2] / "examples" / "losses"
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def loaded(name: str, **kwargs: float) -> PolicyGradient:
    """Make the loss as a run does: from the section of its YAML."""
    section = TypeAdapter(PolicyObjective).validate_python(
        {"kind": "path", "path": f"{name}.py:{name}", "kwargs": kwargs}
    )
    assert isinstance(section, UserObjectiveConfig)
    made = load_function(section.path, LOSSES, "objective.path")(**section.kwargs)
    assert isinstance(made, PolicyGradient)
    return made


PAIRS: dict[str, tuple[PolicyGradient, Callable[[Case], Found]]] = {
    "luspo": (loaded("luspo"), lambda case: oracle.luspo(case, 3e-4, 4e-4)),
    "luspo, wide": (loaded("luspo", low=0.06, high=0.09), lambda case: oracle.luspo(case, 0.06, 0.09)),
    "gmpo": (loaded("gmpo"), lambda case: oracle.gmpo(case, 0.4, 0.4)),
    "gmpo, narrow": (loaded("gmpo", low=0.1, high=0.2), lambda case: oracle.gmpo(case, 0.1, 0.2)),
    "vespo": (loaded("vespo"), lambda case: oracle.vespo(case, (2.0, 3.0), (3.0, 2.0))),
    "vespo, other": (
        loaded("vespo", k_positive=1.0, rate_negative=0.5),
        lambda case: oracle.vespo(case, (1.0, 3.0), (3.0, 0.5)),
    ),
}
each_pair = pytest.mark.parametrize(("objective", "expected"), PAIRS.values(), ids=PAIRS)


@each_pair
@pytest.mark.parametrize("seed", range(3))
def test_terms_and_gradients_are_those_of_the_paper(objective: PolicyGradient, expected: Any, seed: int) -> None:
    case = draw(seed, flat=True)

    terms, gradient, _ = objective_found(objective, case)

    np.testing.assert_allclose(terms, expected(case)[0], **EXACT)
    np.testing.assert_allclose(gradient, expected(case)[1], **EXACT)


@each_pair
def test_the_first_update_has_the_policy_gradient(objective: PolicyGradient, expected: Any) -> None:
    case = draw(on_policy=True, flat=True)
    lengths = case.per_sequence(len, case.logprobs)
    sequence_mean = replace(case, weights=1 / lengths)

    _, gradient, _ = objective_found(objective, sequence_mean)

    factor = lengths if "LUSPO" in repr(objective) else 1.0
    np.testing.assert_allclose(gradient, -case.advantages * factor / lengths, **EXACT)


@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1000.0, -1000.0])
def test_a_proximal_policy_a_thousand_nats_away_gives_finite_terms_and_gradients(
    objective: PolicyGradient, expected: Any, dtype: torch.dtype, far: float
) -> None:
    case = draw()
    case = replace(case, proximal=case.logprobs - far)
    live = torch.tensor(case.logprobs, dtype=dtype, requires_grad=True)

    terms = objective.token_terms(live, None, tokens_of(case, dtype))
    (gradient,) = torch.autograd.grad(terms.sum(), live)

    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()


@each_pair
def test_a_users_loss_runs_through_the_head(objective: PolicyGradient, expected: Any) -> None:
    model = twin(strong_model("llama", scale=2.0), torch.float64)
    batch = a_batch(model, proximal=True)
    loss, gradients = through_transformers(model, objective, batch)

    result, found = through_our_head(model, objective, batch)

    assert_close(result.loss, loss, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)


def test_a_users_surrogate_takes_the_regularisers_of_any_other() -> None:
    case = draw(flat=True)

    terms, _, _ = objective_found(replace(loaded("gmpo"), kl=KLConfig(coefficient=0.3)), case)

    expected = oracle.gmpo(case, 0.4, 0.4)[0] + 0.3 * oracle.kl("k3", case.logprobs, case.reference)[0]
    np.testing.assert_allclose(terms, expected, **EXACT)


def test_each_reports_what_its_bound_or_weight_does() -> None:
    case = draw(flat=True)
    ratio, positive = np.exp(case.log_ratio), case.advantages > 0
    low, high = ~positive & (ratio < np.exp(-0.4)), positive & (ratio > np.exp(0.4))
    phi = -oracle.vespo(case, (2.0, 3.0), (3.0, 2.0))[1] / case.weights / case.advantages
    of_sequence = np.exp(case.per_sequence(np.mean, case.log_ratio))

    shown = {name: means(loaded(name).sums(scores_of(case), tokens_of(case))) for name in ("luspo", "gmpo", "vespo")}

    assert shown["gmpo"]["clip_ratio/low_mean"] == pytest.approx(low.mean())
    assert shown["gmpo"]["clip_ratio/high_mean"] == pytest.approx(high.mean())
    assert shown["vespo"]["vespo/phi_seq_mean"] == pytest.approx(phi.mean(), rel=1e-9)
    assert shown["luspo"]["clip_ratio/high_mean"] == pytest.approx((positive & (of_sequence > 1.0004)).mean())


@dataclass(frozen=True)
class Named:
    """A loss of a user's own, one of whose numbers is called as ours."""

    label_smoothing: float = 0.5
    separable: bool = True
    needs_entropy: bool = False

    def token_terms(self, logprobs: Tensor, entropy: Tensor | None, tokens: Tokens) -> Tensor:  # noqa: ARG002
        return -logprobs

    def sums(self, scores: Scores, tokens: Tokens) -> dict[str, Tensor]:  # noqa: ARG002
        return {}


def test_a_number_of_a_users_loss_is_its_own() -> None:
    model = twin(strong_model("llama", scale=2.0), torch.float64)
    batch = a_batch(model, proximal=True)

    result, _ = through_our_head(model, Named(), batch)

    plain, _ = through_our_head(model, NegativeLogLikelihood(), batch)
    smoothed, _ = through_our_head(model, NegativeLogLikelihood(label_smoothing=0.5), batch)
    assert torch.equal(result.loss, plain.loss)
    assert not torch.allclose(result.loss, smoothed.loss)
