"""Copies of shards on several ranks (HSDP) are compared with each other: each is sound, and two may differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.features.rescue.reading.recognise import open_foreign
from tests.cli.in_process import cli_in_process
from tests.features.rescue.reading import hash_of, place_of, truth_of
from tests.features.rescue.test_import import tokens
from tests.features.rescue.test_verdict import checked

__all__ = ["tokens"]  # a fixture of these tests, too


def write_copies(actor: Path, weights: dict[str, torch.Tensor], diverged: int | None, name: str) -> None:
    """Write the files of four ranks, two copies of two shards; one rank's shard of one weight has other numbers."""
    for rank in range(4):
        with mesh_of(rank) as mesh:
            state = {each: shard_of(whole, mesh, rank) for each, whole in weights.items()}
            if rank == diverged:
                state[name]._local_tensor += 0.5
            torch.save(state, actor / f"model_world_size_4_rank_{rank}.pt")


@contextmanager
def mesh_of(rank: int) -> Iterator[DeviceMesh]:
    """Return the mesh of four ranks, two copies of two shards, as one of them has it."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        yield DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ddp", "fsdp"))
    finally:
        dist.destroy_process_group()


def shard_of(whole: torch.Tensor, mesh: DeviceMesh, rank: int) -> DTensor:
    """Return a rank's rows of a tensor, or all of a tensor of one row."""
    is_cut = whole.shape[0] > 1
    rows = whole.chunk(2)[rank % 2].clone() if is_cut else whole.clone()
    return DTensor.from_local(
        rows, mesh, [Replicate(), Shard(0) if is_cut else Replicate()], run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


@pytest.mark.cases("all")
@pytest.mark.parametrize("diverged", [None, 2, 3])
def test_a_copy_with_other_numbers_is_damage(tmp_path: Path, diverged: int | None) -> None:
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    weights = {f"layer{number}.weight": torch.arange(30.0).reshape(5, 6) + number for number in range(12)}
    write_copies(actor, weights, diverged, "layer10.weight")

    code, said = checked(actor)

    assert code == (0 if diverged is None else 1)
    assert said.splitlines()[-1].startswith("whole" if diverged is None else "damaged: 1 finding")
    for rank in () if diverged is None else (diverged, diverged - 2):
        assert f"rank_{rank}.pt" in said
    assert ("layer10.weight differs" in said) == (diverged is not None)
    assert torch.equal(open_foreign(actor).weights["layer9.weight"].read(), weights["layer9.weight"])


@pytest.mark.cases("all")
@pytest.mark.parametrize("diverged", [None, 2])
def test_no_export_is_made_of_copies_that_diverged(
    fixtures: Path, tokens: Path, diverged: int | None, tmp_path: Path
) -> None:
    """An import looks at headers and at few numbers first; the last weight is compared when it is read."""
    actor, source = tmp_path / "global_step_2" / "actor", place_of(fixtures / "verl-fsdp2") / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    shutil.copytree(source / "huggingface", actor / "huggingface")
    weights = truth_of(fixtures / "verl-fsdp2")["model"]
    write_copies(actor, weights, diverged, last := list(weights)[-1])
    before = hash_of(actor)

    done = cli_in_process("checkpoint", "import", actor, "--export", tmp_path / "out", "--model", tokens, cwd=tmp_path)

    assert done.code == (0 if diverged is None else 1), done
    assert (tmp_path / "out").exists() == (diverged is None)
    if diverged is not None:
        assert last in done.err
        assert "model_world_size_4_rank_0.pt has other numbers than model_world_size_4_rank_2.pt" in done.err
    assert hash_of(actor) == before


State = dict[str, Any]
WEIGHTS = {
    f"layers.{number}.{name}": torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) + number
    for number in range(3)
    for name, shape in (("a", (4, 6)), ("b", (6,)), ("one", (1, 5)))
}


def optimizer_of(kind: str, mesh: DeviceMesh, rank: int) -> tuple[list[Any], list[State]]:
    """Return the parameters and the states of a rank: runs, flat layers, or DTensors with numbers or names."""
    if kind == "flat":
        moments = [torch.cat([w.flatten() for key, w in WEIGHTS.items() if f".{n}." in key]) for n in range(3)]
        moments = [
            torch.cat([moment, moment.new_zeros(len(moment) % 2)]).chunk(2)[rank % 2].clone() for moment in moments
        ]
    elif kind == "runs":
        moments = [whole.flatten().chunk(2)[rank % 2].clone() for whole in WEIGHTS.values()]
    else:
        moments = [shard_of(whole, mesh, rank) for whole in WEIGHTS.values()]
    numbers = list(WEIGHTS) if kind == "names" else list(range(len(moments)))
    return numbers, [{"exp_avg": moment, "step": torch.tensor(2.0)} for moment in moments]


def checked_optimizer(tmp_path: Path, kind: str, change: Callable[[int, list[State]], object]) -> tuple[int, str, Path]:
    """Check four ranks whose optimizer was changed on a rank."""
    actor = tmp_path / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    write_copies(actor, WEIGHTS, None, "")
    for rank in range(4):
        with mesh_of(rank) as mesh:
            numbers, states = optimizer_of(kind, mesh, rank)
            change(rank, states)
            content = {
                "state": {number: state for number, state in zip(numbers, states, strict=True) if state},
                "param_groups": [{"params": numbers, "lr": 0.1}],
            }
            torch.save(content, actor / f"optim_world_size_4_rank_{rank}.pt")
    return *checked(actor), actor


KINDS = ("runs", "flat", "numbers", "names")


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_an_optimizer_are_no_damage(tmp_path: Path, kind: str) -> None:
    code, said, actor = checked_optimizer(tmp_path, kind, lambda rank, states: None)

    assert (code, said.splitlines()[-1][:5]) == (0, "whole"), said
    states = open_foreign(actor).states
    assert states.keys() == WEIGHTS.keys()
    for name, whole in WEIGHTS.items():
        assert torch.equal(states[name]["exp_avg"].read(), whole)


def other_number(states: list[State]) -> None:
    moment = states[2]["exp_avg"]
    getattr(moment, "_local_tensor", moment).view(-1)[0] += 1


def without_state(states: list[State]) -> None:
    states[2].clear()


def without_step(states: list[State]) -> None:
    del states[2]["step"]


def long_step(states: list[State]) -> None:
    states[2]["step"] = torch.full((2,), 2.0)


HARMS = (other_number, without_state, without_step, long_step)


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", HARMS)
def test_what_copies_of_an_optimizer_do_not_share_is_damage(
    tmp_path: Path, kind: str, harm: Callable[[list[State]], None]
) -> None:
    code, said, _ = checked_optimizer(tmp_path, kind, lambda rank, states: harm(states) if rank > 1 else None)

    assert (code, said.splitlines()[-1][:7]) == (1, "damaged"), said


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_a_copy_of_another_shape_is_damage(tmp_path: Path, kind: str) -> None:
    def longer(rank: int, states: list[State]) -> None:
        if rank == 3:
            states[2]["exp_avg"]._local_tensor = torch.ones(1, 6)

    code, said, _ = checked_optimizer(tmp_path, kind, longer)

    assert code == 1
    assert "has another shape on another rank" in said


def test_zeros_of_two_signs_differ(tmp_path: Path) -> None:
    def signed(rank: int, states: list[State]) -> None:
        moment = states[2]["exp_avg"]._local_tensor
        moment.view(-1)[0] = -0.0 if rank == 3 else 0.0

    code, said, _ = checked_optimizer(tmp_path, "numbers", signed)

    assert code == 1
    assert "exp_avg of layers.0.one differs" in said


def test_a_file_of_another_share_is_damage_among_copies(tmp_path: Path) -> None:
    _, _, actor = checked_optimizer(tmp_path, "flat", lambda rank, states: None)
    shutil.copyfile(actor / "optim_world_size_4_rank_1.pt", actor / "optim_world_size_4_rank_2.pt")

    code, said = checked(actor)

    assert code == 1
    assert "optim_world_size_4_rank_2.pt" in said
