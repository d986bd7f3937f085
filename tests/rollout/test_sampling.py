"""Drawing at its edges: numbers that rounding could put behind every token that has any probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.rollout.sampling import draw, most_probable, restrict

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


class LargestWide(TorchDispatchMode):
    """Notes the most float64 numbers that an operation returned for one row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.most = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.most = max(self.most, tensor.numel() // self.rows)
        return result


@pytest.mark.parametrize(
    ("options", "wide"), [({}, False), ({"top_k": 50}, False), ({"min_p": 0.1}, False), ({"top_p": 0.9}, True)]
)
def test_only_top_p_makes_a_pass_over_the_vocabulary_in_float64(options: dict[str, float], wide: bool) -> None:
    logits = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)

    with LargestWide(rows=3) as seen:
        draw(restrict(logits.clone(), SamplingConfig(**options)), uniforms)
        most_probable(logits)

    assert seen.most >= 512, "sums of blocks are float64"
    assert (seen.most >= 151_936) is wide
