"""State in a tensor subclass, as quantised optimizers keep it, is refused by name: its parts would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import checkpoint
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, optimizer_of, step


class Quantised(Tensor):
    """Numbers as eight-bit integers and one scale, behind the face of a float32 tensor."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.numbers * value.scale if isinstance(value, Quantised) else value

        return function(*map(plain, args), **{key: plain(value) for key, value in (kwargs or {}).items()})


class QuantisedSGD(torch.optim.Optimizer):
    """Keeps a momentum that is quantised."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                numbers = torch.zeros(local.shape, dtype=torch.int8)
                self.state[parameter]["momentum"] = Quantised(numbers, torch.ones(()))


def try_it(world: World, run: str, call: str) -> None:
    toy = build(world)
    optimizer = QuantisedSGD([each for each in toy.parameters() if each.requires_grad])
    if call == "rehearse":
        checkpoint.rehearse(run, toy, optimizer, timeout_minutes=1.0)
        return
    step(world, toy, optimizer, 0)
    checkpoint.save(f"{run}/step-00000001", toy, optimizer, timeout_minutes=1.0)


@pytest.mark.parametrize("call", ["rehearse", "save"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantised_state_is_refused_by_parameter_and_key_on_all_ranks(
    pools: Any, tmp_path: Path, ranks: int, call: str
) -> None:
    errors = pools(ranks).errors(try_it, str(tmp_path), call)

    assert errors == [errors[0]] * ranks
    assert errors[0][0] == "UnsavableOptimizer"
    where = "state 'momentum' of blocks.0.trained.weight is a tests.checkpoint.test_tensor_subclasses.Quantised"
    assert where in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def save_model_of_a_subclass(world: World, run: str) -> None:
    toy = build(world)
    block = toy.language_model.blocks[0]
    block.calls = Quantised(torch.zeros(3, dtype=torch.int8), torch.ones(()))
    checkpoint.save(f"{run}/step-00000001", toy, optimizer_of(toy), timeout_minutes=1.0)


def test_a_model_s_tensor_of_a_subclass_is_refused_by_name(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(save_model_of_a_subclass, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert "blocks.0.calls is a tests.checkpoint.test_tensor_subclasses.Quantised" in errors[0][1]
    assert list(tmp_path.iterdir()) == []
