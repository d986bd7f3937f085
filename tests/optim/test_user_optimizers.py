"""Optimizers by path: what is found out when they are built, and that their state survives another number of ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.config.sections.optim import UserOptimizerConfig
from holdfast.errors import UserError
from holdfast.optim.user import rehearse_user_optimizer
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.setup.optimizers import build_optimizer, optimizer_of
from tests.checkpoint.cases import build, contents, step
from tests.distributed.toys import Toy
from tests.settings import setting_of
from tests.versions import skip_with

OWN = Path(__file__).with_name("own.py")


def rehearsed(world: World, config: UserOptimizerConfig, parameters: dict[str, torch.nn.Parameter]) -> Any:
    run = setting_of(config, world)
    optimizer = optimizer_of(run, parameters)
    rehearse_user_optimizer(config, type(optimizer), parameters, run.ranks, run.whether_all_raise())
    return optimizer


def made(world: World, path: str, kwargs: dict[str, Any], *, seed: int = 0, **values: Any) -> tuple[Toy, Any]:
    toy = build(world, seed=seed)
    config = UserOptimizerConfig(path=path, lr=0.01, kwargs=kwargs, **values)
    return toy, rehearsed(world, config, sharded_parameters(toy))


def try_to_make(world: World, path: str, kwargs: dict[str, Any], values: dict[str, Any]) -> None:
    made(world, path, kwargs, **values)


REFUSED = [
    (f"{OWN}:DecaysBeside", {}, {}, "does not go on where it was saved.* It keeps count beside them"),
    (f"{OWN}:CountsBeside", {}, {}, "does not go on where it was saved.* It keeps count beside them"),
    (f"{OWN}:KeepsAnObject", {}, {}, "state 'history' of .* is a builtins.object, which has no written form"),
    (f"{OWN}:NeedsAClosure", {}, {}, "step needs a closure"),
    (f"{OWN}:WithoutRate", {}, {}, "takes no lr, so optim.lr and its schedule would change nothing"),
    (f"{OWN}:not_a_class", {}, {}, "is no optimizer but a function"),
    (f"{OWN}:Momentum", {"shar": 0.1}, {}, "optim.kwargs.shar: .* takes no shar; did you mean share?"),
    (f"{OWN}:Momentum", {}, {"weight_decay": 0.1}, "takes no weight_decay"),
    (f"{OWN}:Missing", {}, {}, "has no function Missing. It has .*Momentum"),
    ("torch.optim:LBFGS", {}, {}, "step needs a closure"),
    ("torch.optim:SparseAdam", {}, {}, "SparseAdam does not support dense gradients"),
    ("torch.optim:Muon", {}, {}, "Muon only supports 2D parameters"),
    ("torch.optim:RMSpro", {}, {}, "torch.optim has no RMSpro. It has .*RMSprop"),
    ("torch.optim:RMSprop", {"alpha": -1.0}, {}, "alpha=-1.0 raises ValueError: Invalid alpha value"),
    ("no_such_package.optim:Lion", {}, {}, "no_such_package.optim cannot be imported: ModuleNotFoundError"),
]
ON_SHARDS = [
    (f"{OWN}:NormOfAShard", "gives other numbers on shards than on whole parameters"),
    (f"{OWN}:CountsOnlyItsOwn", "differs between ranks and is not sharded"),
    (f"{OWN}:LocalBuffer", "is a plain tensor beside a sharded parameter"),
    ("torch.optim:Adafactor", "fails in its first steps on shards of parameters"),
    pytest.param(
        "torch.optim:Rprop",
        "fails in its first steps on shards of parameters",
        marks=skip_with("torch>=2.15", "its Rprop works on shards"),
    ),
]
GOOD = [
    ("torch.optim:RMSprop", {"momentum": 0.9, "centered": True}),
    ("torch.optim:NAdam", {}),
    ("torch.optim:Adagrad", {"initial_accumulator_value": 0.5}),
    ("torch.optim:SGD", {"momentum": 0.9, "nesterov": True}),
    ("torch.optim:ASGD", {}),
    (f"{OWN}:RowNorms", {}),
    (f"{OWN}:Factored", {}),
]


@pytest.mark.parametrize(("path", "kwargs", "values", "said"), REFUSED)
def test_what_cannot_train_or_be_saved_is_refused_on_all_ranks(
    pools: Any, path: str, kwargs: dict[str, Any], values: dict[str, Any], said: str
) -> None:
    errors = pools(2).errors(try_to_make, path, kwargs, values)

    assert {kind for kind, _ in errors} <= {"ConfigError", "UnsavableOptimizer"}
    assert len(set(errors)) == 1
    with pytest.raises(ValueError, match=said):
        raise ValueError(errors[0][1])


@pytest.mark.parametrize(("path", "kwargs", "values", "said"), REFUSED)
def test_it_is_refused_in_a_run_of_one_rank_too(
    path: str, kwargs: dict[str, Any], values: dict[str, Any], said: str
) -> None:
    world = World(0, 1, 0, torch.device("cpu"), FailureChannel(torch.distributed.HashStore(), 0, 1))
    config = UserOptimizerConfig(path=path, lr=0.01, kwargs=kwargs, **values)
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in {"a": (3, 2), "b": (4,)}.items()}

    with pytest.raises(UserError, match=said):
        rehearsed(world, config, parameters)


@pytest.mark.parametrize(("path", "said"), ON_SHARDS)
def test_what_works_on_whole_parameters_only_is_refused_where_they_are_sharded(
    pools: Any, path: str, said: str
) -> None:
    pools(1).run(try_to_make, path, {}, {})

    errors = pools(2).errors(try_to_make, path, {}, {})

    assert len(set(errors)) == 1
    assert said in errors[0][1]


def train(world: World, path: str, kwargs: dict[str, Any], steps: int) -> dict[str, Any]:
    toy, optimizer = made(world, path, kwargs)
    for number in range(steps):
        step(world, toy, optimizer, number)
    return contents(toy, optimizer)


def train_and_save(world: World, path: str, kwargs: dict[str, Any], steps: int, place: str) -> dict[str, Any]:
    toy, optimizer = made(world, path, kwargs)
    for number in range(steps):
        step(world, toy, optimizer, number)
    checkpoint.rehearse(str(Path(place).parent), toy, optimizer)
    checkpoint.save(place, toy, optimizer)
    return contents(toy, optimizer)


def load_and_train(
    world: World, path: str, kwargs: dict[str, Any], steps: range, place: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    toy, optimizer = made(world, path, kwargs, seed=1)
    checkpoint.load(place, toy, optimizer)
    loaded = contents(toy, optimizer)
    for number in steps:
        step(world, toy, optimizer, number)
    return loaded, contents(toy, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "kwargs"), GOOD)
def test_state_goes_on_bit_for_bit_and_arrives_whole_on_other_numbers_of_ranks(
    pools: Any, tmp_path: Path, path: str, kwargs: dict[str, Any]
) -> None:
    place = str(tmp_path / "step-00000002")
    straight = pools(2).run(train, path, kwargs, 4)[0]

    saved = pools(2).run(train_and_save, path, kwargs, 2, place)[0]

    assert pools(2).run(load_and_train, path, kwargs, range(2, 4), place)[0] == (saved, straight)
    for ranks in (1, 3):
        loaded, _ = pools(ranks).run(load_and_train, path, kwargs, range(2, 4), place)[0]
        assert loaded == saved
    assert any("/" in name for name in saved)


def test_state_that_a_constructor_makes_is_there_for_parameters_the_checkpoint_has_none_of() -> None:
    from holdfast.optim.state import collect, restore

    old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    before = torch.optim.Adagrad([old], lr=0.5)
    old.grad = torch.ones(2)
    before.step()
    saved = collect(before, {"old": old})
    after = torch.optim.Adagrad([old, new], lr=0.5, initial_accumulator_value=3.0)

    restore(after, {"old": old, "new": new}, saved)
    old.grad, new.grad = torch.ones(2), torch.ones(2)
    after.step()

    assert after.state[old]["sum"].tolist() == [2.0, 2.0]
    assert new.tolist() == [0.75, 0.75]  # 1 - 0.5 / sqrt(3 + 1)


def test_sgd_has_torchs_options(pools: Any) -> None:
    from holdfast.config.sections.optim import SGDConfig

    weight = torch.nn.Parameter(torch.tensor([1.0]))
    config = SGDConfig(lr=0.5, momentum=0.5, nesterov=True, weight_decay=0.25, no_decay=[])
    optimizer = build_optimizer(config, {"weight": weight})

    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()

    # d = 1 + 0.25 w; buffer = d, then 0.5 buffer + d; w -= 0.5 (d + 0.5 buffer)
    first = 1.0 - 0.5 * (1.25 + 0.5 * 1.25)
    slope = 1 + 0.25 * first
    assert weight.item() == pytest.approx(first - 0.5 * (slope + 0.5 * (0.5 * 1.25 + slope)))


def test_an_optimizer_of_a_package_in_the_current_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizers").mkdir()
    (tmp_path / "own_optimizers" / "slow.py").write_text("from torch.optim import SGD as Slow\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    world = World(0, 1, 0, torch.device("cpu"), FailureChannel(torch.distributed.HashStore(), 0, 1))
    config = UserOptimizerConfig(path="own_optimizers.slow:Slow", lr=0.1)
    run = replace(setting_of(config, world), base=tmp_path / "configs")

    built = optimizer_of(run, {"weight": torch.nn.Parameter(torch.ones(2, 2))})

    assert type(built) is torch.optim.SGD
