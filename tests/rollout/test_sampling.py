"""Drawing at its edges: numbers that rounding could put behind every token that has any probability."""

from __future__ import annotations

import pytest
import torch

from holdfast.rollout.sampling import draw

ALMOST_ONE = 1 - 2.0**-53


@pytest.mark.parametrize("vocabulary", [3, 511, 512, 513, 1300])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_largest_number_draws_the_last_token_that_has_any_probability(vocabulary: int, last: int) -> None:
    last_possible = vocabulary - 1 - last
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[:, last_possible + 1 :] = float("-inf")

    tokens, logprobs = draw(logits.clone(), torch.full((4,), ALMOST_ONE, dtype=torch.float64))

    assert tokens.tolist() == [last_possible] * 4
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, last_possible], rtol=1e-5, atol=1e-5)


def test_zero_draws_the_first_token_that_has_any_probability() -> None:
    logits = torch.zeros(1, 1300)
    logits[:, :700] = float("-inf")

    tokens, _ = draw(logits, torch.zeros(1, dtype=torch.float64))

    assert tokens.tolist() == [700]


def test_no_number_draws_a_token_without_probability() -> None:
    logits = torch.full((2000, 600), float("-inf"))
    logits[:, 5:590:3] = torch.randn(2000, 195, generator=torch.Generator().manual_seed(0)) * 20
    uniforms = torch.rand(2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    tokens, logprobs = draw(logits.clone(), uniforms)

    assert bool(((tokens - 5) % 3 == 0).all())
    assert bool(logprobs.isfinite().all())
