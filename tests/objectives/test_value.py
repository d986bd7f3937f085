"""The value loss and its gradient are those of a loop over tokens, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.objectives.base import Tokens
from holdfast.objectives.supervised import ValueLoss
from holdfast.types import Scores
from tests.oracle import critic as oracle


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_the_clipped_error_and_its_gradient_are_by_hand(clip: float | None) -> None:
    now, before, returns, weights = np.random.default_rng(0).normal(size=(4, 200))
    values = torch.tensor(now, requires_grad=True)
    carried = {"values": torch.tensor(before), "returns": torch.tensor(returns)}
    tokens = Tokens(torch.tensor(weights), carried, torch.arange(200) // 7, 29)
    objective = ValueLoss(clip)

    terms = objective.token_terms(values, None, tokens)
    (gradient,) = torch.autograd.grad((terms * tokens.weights).sum(), values)
    sums = objective.sums(Scores(values.detach(), values > 0, None), tokens)

    expected = [oracle.value_loss(*each, clip) for each in zip(now, before, returns, strict=True)]
    np.testing.assert_allclose(terms.detach().numpy(), [term for term, _ in expected], rtol=0, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), weights * [slope for _, slope in expected], rtol=0, atol=1e-12)
    held = np.array([slope == 0.0 for _, slope in expected])
    if clip is None:
        assert sums == {}
    else:
        assert sums["clip_fraction"].tolist() == [held.sum(), 200.0]
        assert held.any() == (clip == 0.2), "the case clips where the bound is narrow"
