"""Copies of shards on several ranks (HSDP) are compared with each other: each is sound, and two may differ."""

from __future__ import annotations

import shutil
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
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ddp", "fsdp"))
        state: dict[str, Any] = {}
        for each, whole in weights.items():
            rows = whole.chunk(2)[rank % 2] + (0.5 if (rank, each) == (diverged, name) else 0.0)
            state[each] = DTensor.from_local(
                rows.contiguous(), mesh, [Replicate(), Shard(0)], run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip
        torch.save(state, actor / f"model_world_size_4_rank_{rank}.pt")
        dist.destroy_process_group()


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
