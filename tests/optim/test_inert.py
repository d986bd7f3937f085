"""What an optimizer will hold is learned without a trace of having been looked for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.optim.state_template import inert_state
from tests.optim.own import Momentum


class Langevin(Momentum):
    """Gradient descent with noise (Welling and Teh, 2011), from each generator there is and from some of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.torch_own = torch.Generator().manual_seed(1)
        self.python_own = random.Random(2)
        self.numpy_own = np.random.default_rng(3)

    def draws(self) -> list[float]:
        """Return the next number of every generator."""
        drawn = [float(torch.rand(())), float(torch.rand((), generator=self.torch_own))]
        return [*drawn, random.random(), np.random.rand(), self.python_own.random(), self.numpy_own.random()]

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(parameter, state, group)
        parameter.add_(torch.randn_like(parameter) * sum(self.draws()))


def test_looking_for_the_state_of_an_optimizer_that_draws_changes_no_draw() -> None:
    drawn = []
    for looked in (False, True):
        random.seed(5)
        np.random.seed(6)
        torch.manual_seed(7)
        matrix = nn.Parameter(torch.ones(3, 4))
        optimizer = Langevin([matrix])
        if looked:
            found = inert_state(optimizer, {"matrix": matrix})
            assert torch.equal(found.tensors["matrix"]["average"], torch.zeros(3, 4))
        drawn.append(optimizer.draws())

    assert drawn[0] == drawn[1]


class FactorsLargeOnes(Momentum):
    """Keeps a number per row of a matrix with many rows, and one per element of all else."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        squares = parameter.grad.square()
        state["squares"] = squares.mean(-1, keepdim=True) if len(parameter) >= 100 else squares


def test_state_whose_form_depends_on_a_parameter_s_size_is_what_a_step_makes() -> None:
    parameters = {"small": nn.Parameter(torch.ones(5, 6)), "large": nn.Parameter(torch.ones(100, 6))}
    optimizer = FactorsLargeOnes(parameters.values())

    found = inert_state(optimizer, parameters)

    assert {name: list(state["squares"].shape) for name, state in found.tensors.items()} == {
        "small": [5, 6],
        "large": [100, 1],
    }
    assert not optimizer.state
