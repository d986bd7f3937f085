"""The norm of gradients: exact sums over many tensors, and little memory beside narrow ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.training.step import squared_norm
from tests.memory import most_allocated

CPU = torch.device("cpu")
MIB = 2**20


def gradients(dtype: torch.dtype, sizes: list[int]) -> list[torch.Tensor]:
    """Return gradients of some sizes, drawn by a seed."""
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=draws).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[], [0], [5, 0, 3], [2**24 + 7, 3, 1]], ids=str)
def test_the_squares_of_all_gradients_are_added(dtype: torch.dtype, sizes: list[int]) -> None:
    of_rank = gradients(dtype, sizes)

    found = squared_norm(of_rank, CPU)

    exact = sum(float(np.square(gradient.double().numpy()).sum()) for gradient in of_rank)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(exact, rel=1e-6)


def test_a_norm_does_not_depend_on_how_a_gradient_is_sharded() -> None:
    (whole,) = gradients(torch.float32, [2**24])

    one, four = (sum(float(squared_norm([shard], CPU)) for shard in whole.chunk(ranks)) for ranks in (1, 4))

    assert four == pytest.approx(one, rel=1e-12)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # of torch 2.11
def test_the_norm_of_narrow_gradients_copies_64_mib_of_them_at_a_time() -> None:
    of_rank = gradients(torch.bfloat16, [2**26, 2**20, 2**25])  # 194 MiB, and 388 as float32

    taken = most_allocated(lambda: squared_norm(of_rank, CPU))

    assert taken < 70 * MIB
