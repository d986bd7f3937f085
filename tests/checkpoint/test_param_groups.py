"""Param groups are matched by the parameters in them; what cannot be matched is refused before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import checkpoint
from holdfast.checkpoint.inspect.compare import differences, state_hash
from holdfast.checkpoint.keep import find
from holdfast.checkpoint.loading.matching import Declared
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from tests.checkpoint.cases import build, contents, step
from tests.crash.runs import values_of
from tests.distributed.toys import Toy
from tests.training.cases import run

WEIGHT, BIAS = "blocks.0.trained.weight", "blocks.0.trained.bias"


def grouped(toy: Toy, how: str) -> torch.optim.AdamW:
    """Return an optimizer whose groups are made in one of several ways."""
    parameters = {name: each for name, each in sharded_parameters(toy).items() if each.requires_grad}
    biases = [each for name, each in parameters.items() if name.endswith("bias")]
    weights = [each for name, each in parameters.items() if not name.endswith("bias")]
    groups: dict[str, list[dict[str, Any]]] = {
        "two": [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "eps": 1e-5}],
        "other order": [{"params": biases, "weight_decay": 0.7}, {"params": weights, "weight_decay": 0.8}],
        "one": [{"params": [*weights, *biases]}],
        "three": [{"params": weights[:1]}, {"params": weights[1:]}, {"params": biases}],
        "mixed": [{"params": [*weights[1:], *biases]}, {"params": weights[:1]}],
        "fewer": [{"params": [parameters[WEIGHT]]}],
        "without a bias": [{"params": weights}, {"params": [each for each in biases if each is not parameters[BIAS]]}],
    }
    return torch.optim.AdamW(groups[how], lr=0.05)


def save_grouped(world: World, path: str, how: str) -> None:
    toy = build(world)
    optimizer = grouped(toy, how)
    step(world, toy, optimizer, 0)
    checkpoint.save(path, toy, optimizer)


def load_grouped(world: World, path: str, how: str, source: str, declared: Declared) -> dict[str, Any]:
    """Load, and return the error or what every parameter is updated with, and whether a refusal left all as it was."""
    toy = build(world, seed=1)
    optimizer = grouped(toy, how)
    step(world, toy, optimizer, 7)
    before = contents(toy, optimizer), _settings(toy, optimizer)
    try:
        found = checkpoint.load(path, toy, optimizer, hyperparameters=source, declared=declared)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        same = before == (contents(toy, optimizer), _settings(toy, optimizer))
        return {"error": type(error).__name__, "message": str(error), "untouched": same}
    names = {id(each): name for name, each in sharded_parameters(toy).items()}
    state = {names[id(parameter)] for parameter in optimizer.state}
    return {"settings": _settings(toy, optimizer), "notes": found.notes, "state": state}


def _settings(toy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(each): name for name, each in sharded_parameters(toy).items()}
    return {
        names[id(parameter)]: (group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run") / "step-00000001")
    pools(2).run(save_grouped, path, "two")
    return path


@pytest.mark.parametrize("how", ["two", "other order", "three"])
def test_hyperparameters_of_the_checkpoint_go_to_the_parameters_they_were_saved_with(
    pools: Any, saved: str, how: str
) -> None:
    found = pools(2).run(load_grouped, saved, how, "checkpoint", Declared())

    expected = {name: (0.0, 1e-5) if name.endswith("bias") else (0.1, 1e-8) for name in found[0]["settings"]}
    assert expected[WEIGHT] != expected[BIAS]
    assert [each["settings"] for each in found] == [expected] * 2


@pytest.mark.parametrize("how", ["one", "mixed"])
def test_groups_that_join_what_was_apart_are_refused_and_nothing_is_touched(pools: Any, saved: str, how: str) -> None:
    found = pools(2).run(load_grouped, saved, how, "checkpoint", Declared())

    assert found[0] == found[1]
    assert found[0]["error"] == "CheckpointMismatch"
    assert "has weight_decay 0.1 there and blocks." in found[0]["message"]
    assert "0.0, and this optimizer updates them in one group" in found[0]["message"]
    assert found[0]["untouched"]


def test_live_hyperparameters_may_be_grouped_in_any_way_and_each_difference_is_told(pools: Any, saved: str) -> None:
    found = pools(2).run(load_grouped, saved, "one", "live", Declared())[0]

    assert set(found["settings"].values()) == {(0.01, 1e-8)}
    told = [note for note in found["notes"] if "weight_decay" in note]
    assert len(told) == 2
    assert "weight_decay: 0.1 in the checkpoint, 0.01 now" in told[0]
    assert "weight_decay: 0.0 in the checkpoint, 0.01 now" in told[1]


@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_an_optimizer_that_holds_fewer_parameters_is_refused_and_nothing_is_touched(
    pools: Any, saved: str, source: str
) -> None:
    found = pools(2).run(load_grouped, saved, "fewer", source, Declared())

    assert found[0] == found[1]
    assert found[0]["error"] == "CheckpointMismatch"
    assert f"{BIAS} was updated by the checkpoint's optimizer and is not by this one" in found[0]["message"]
    assert "(allow it with resume.freeze)" in found[0]["message"]
    assert found[0]["untouched"]


def test_an_optimizer_that_holds_more_parameters_is_refused(pools: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step-00000001")
    pools(2).run(save_grouped, path, "without a bias")

    found = pools(2).run(load_grouped, path, "two", "live", Declared())

    assert found[0] == found[1]
    assert found[0]["error"] == "CheckpointMismatch"
    assert f"{BIAS} is updated by this optimizer and was not by the checkpoint's" in found[0]["message"]
    assert "(allow it with resume.unfreeze)" in found[0]["message"]
    assert found[0]["untouched"]


def test_a_declared_leaving_out_is_told_and_leaves_no_state_of_others(pools: Any, saved: str) -> None:
    found = pools(2).run(load_grouped, saved, "fewer", "live", Declared(freeze=["."]))[0]

    assert found["state"] == {WEIGHT}
    told = [note for note in found["notes"] if "is not by this one" in note]
    assert len(told) == 7
    assert f"{BIAS} was updated by the checkpoint's optimizer and is not by this one (resume.freeze)" in told


def test_a_run_whose_groups_cannot_take_the_checkpoint_s_hyperparameters_is_refused_as_a_whole(
    pools: Any, tmp_path: Path
) -> None:
    decay = {"lr": 0.01, "weight_decay": 0.1}
    pools(2).run(run, values_of(tmp_path, steps=2, optim=decay))
    log = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    resume = {"resume": {"hyperparameters": "checkpoint"}}
    joined = values_of(tmp_path, steps=4, optim=decay | {"no_decay": []}, checkpoint=resume)

    errors = pools(2).errors(run, joined)

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert "this optimizer updates them in one group" in errors[0][1]
    assert "Nothing was changed." in errors[0][1]
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == log


def save_with_values(world: World, run: str) -> None:
    """Save three times the same tensors: as they are, with other betas, and with another value beside the tensors."""
    toy = build(world)
    optimizer = grouped(toy, "two")
    step(world, toy, optimizer, 0)
    checkpoint.save(f"{run}/step-00000001", toy, optimizer)
    optimizer.param_groups[1]["betas"] = (0.9, 0.5)
    checkpoint.save(f"{run}/step-00000002", toy, optimizer)
    optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    for state in optimizer.state.values():
        state["seen"] = 3
    checkpoint.save(f"{run}/step-00000003", toy, optimizer)


def test_checkpoints_that_differ_in_plain_values_of_the_optimizer_alone_are_not_identical(
    pools: Any, tmp_path: Path
) -> None:
    pools(2).run(save_with_values, str(tmp_path))
    first, betas, seen = (find.one(str(tmp_path / f"step-0000000{number}")) for number in (1, 2, 3))

    assert list(differences(first, first)) == []
    assert list(differences(first, betas)) == ["optimizer: groups.1.hyperparameters.betas.tuple.1 is 0.999 and 0.5"]
    assert list(differences(first, seen)) == ["optimizer: values.blocks.0.single.weight is 'absent' and {'seen': 3}"]
    assert len({state_hash(each) for each in (first, betas, seen)}) == 3
