"""A reference that follows the policy: by the formula, wherever it lives, and over stops and other numbers of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from holdfast.optim.reference_ema import FollowingModel
from holdfast.parallel.plan import ShardPlan, ShardUnit
from holdfast.training.other_models.reference import alternatives, choose_place
from tests.distributed.critic_cases import live_run, saved
from tests.distributed.grpo_cases import prompts_of, settings
from tests.distributed.preference_cases import pairs_of
from tests.distributed.preference_cases import settings as pair_settings
from tests.distributed.preference_cases import train as train_on_pairs
from tests.distributed.reference_cases import follow, said_of_the_choice
from tests.tiny import tiny_directory

ROWS = prompts_of(12)
MIX = 0.3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def following(directory: Path, *, every_steps: int = 2, mix: float = MIX, **sections: Any) -> dict[str, Any]:
    reference = {"sync": {"every_steps": every_steps, "mix": mix}} | sections.pop("reference", {})
    return settings(str(directory), kl={"coefficient": 0.1}, reference=reference, **sections)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(1, {}, id="1 rank"),
        pytest.param(2, {}, id="2 ranks, auto"),
        pytest.param(2, {"reference": {"kind": "offloaded"}}, id="2 ranks, offloaded"),
        pytest.param(2, {"model": {"lora": {"rank": 2}}, "optim": {"lr": 20.0}}, id="2 ranks, adapters"),
        pytest.param(4, {"parallel": {"replicate": 2}}, id="2 copies of 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_the_reference_is_mixed_by_the_formula(pools: Any, llama: Path, ranks: int, sections: dict[str, Any]) -> None:
    found = pools(ranks).run(follow, following(llama, updates={"mini_batches": 2}, **sections), ROWS, 5)

    for told in found:
        expected = told["policies"][0]
        for step in range(6):
            if step in {2, 4}:
                policy = told["policies"][step]
                expected = {name: MIX * policy[name] + (1 - MIX) * value for name, value in expected.items()}
            for name, value in expected.items():
                np.testing.assert_allclose(told["references"][step][name], value, rtol=0, atol=1e-14, err_msg=name)
        start, ends = told["policies"][0], (told["references"][5], told["policies"][4])
        moved, trained = ({name for name in start if (end[name] != start[name]).any()} for end in ends)
        assert moved == trained
        assert len(moved) == (28 if "model" in sections else len(start))
    assert found[0]["dtypes"] == {"torch.float64"}


@pytest.mark.slow
def test_a_reference_that_copies_the_policy_at_every_step_is_no_distance_from_it(pools: Any, llama: Path) -> None:
    lines = pools(2).run(follow, following(llama, every_steps=1, mix=1, optim={"lr": 3.0}), ROWS, 3)[0]["lines"]
    stays = pools(2).run(follow, following(llama, every_steps=9, mix=1, optim={"lr": 3.0}), ROWS, 3)[0]["lines"]

    assert [line["kl"] for line in lines] == [0.0, 0.0, 0.0]
    assert stays[2]["kl"] > 1e-6


def test_pairs_are_compared_with_a_reference_that_follows(pools: Any, llama: Path) -> None:
    """Equal models give every pair the loss ln 2: DPO's sigmoid of 0."""
    tree = pair_settings(str(llama), reference={"sync": {"every_steps": 1, "mix": 1}})

    losses = [line["loss"] for line in pools(2).run(train_on_pairs, tree, pairs_of(12))[0]["lines"]]

    assert losses == pytest.approx([math.log(2)] * 3, rel=1e-12)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float64"])
def test_the_dtype_stays_and_sums_are_rounded_once(kind: str) -> None:
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(3)
    policy, reference = (nn.Linear(7, 5, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        for parameter in (*policy.parameters(), *reference.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    policy.bias.requires_grad_(requires_grad=False)
    before = {name: value.detach().clone() for name, value in reference.named_parameters()}
    exact = 0.6 * policy.weight.detach().double() + 0.4 * before["weight"].double()

    FollowingModel(reference, 1, 0.6).follow(dict(policy.named_parameters()), 1)

    assert reference.weight.dtype == dtype
    last_bits = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(reference.weight.detach().double(), exact, rtol=last_bits, atol=last_bits)
    assert torch.equal(reference.bias.detach(), before["bias"]), "frozen parameters are the same in both already"


@pytest.mark.parametrize("mix", [0.02, 0.1, 0.6, 1.0])
def test_a_reference_in_bfloat16_comes_to_a_policy_that_stands_still(mix: float) -> None:
    """Rounded to the nearest it would stay: a tenth of a distance of four digits is less than half a digit."""
    policy, reference = (nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        policy.weight.fill_(1 + 4 * 2**-7)
        reference.weight.fill_(1.0)

    follow = FollowingModel(reference, 2, mix).follow
    way = []
    for step in range(2, 1002, 2):
        follow(dict(policy.named_parameters()), step)
        way.append(float(reference.weight.detach()))

    assert way == sorted(way)
    assert way[-1] == float(policy.weight.detach())
    assert mix < 1 or way[0] == way[-1]


def run_tree(llama: Path, place: Path, steps: int, **sync: Any) -> dict[str, Any]:
    return following(
        llama,
        steps=steps,
        run={"dir": str(place), "name": "r"},
        optim={"kind": "adamw", "lr": 0.02},
        metrics={"progress": "off"},
        checkpoint={"every_steps": 3, "rehearsal": True, "export_at_end": False, "keep": {"last": 9}},
        reference={"kind": "offloaded"},
        **sync,
    )


def losses_of(place: Path) -> list[tuple[float, float]]:
    lines = read_metrics(place / "r" / "metrics.jsonl")
    return [(line["loss"], line["kl"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def straight(pools: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    pools(2).run(live_run, run_tree(llama, place, 5), ROWS)
    return place


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_reference_bit_for_bit(
    pools: Any, llama: Path, straight: Path, tmp_path: Path
) -> None:
    for steps in (3, 5):
        pools(2).run(live_run, run_tree(llama, tmp_path, steps), ROWS)

    assert list(differences(find.one(str(tmp_path / "r")), find.one(str(straight / "r")))) == []
    assert losses_of(tmp_path) == losses_of(straight)
    tensors, steps = saved(str(straight / "r")), {}
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.")]
    assert {key for key in tensors if key.startswith("reference.")} == {f"reference.model.{name}" for name in names}
    for step in (3, 5):
        steps[step] = saved(str(straight / "r" / "checkpoints" / f"step-{step:08d}"))
    mixed = {
        name: steps[3][f"reference.model.{name}"] != steps[5][f"reference.model.{name}"] for name in names
    }  # it followed at step 4
    assert all(changed.any() for changed in mixed.values())


@pytest.mark.slow
def test_it_goes_on_at_another_number_of_ranks(pools: Any, llama: Path, straight: Path, tmp_path: Path) -> None:
    pools(2).run(live_run, run_tree(llama, tmp_path, 3), ROWS)
    pools(1).run(live_run, run_tree(llama, tmp_path, 5), ROWS)

    one, two = saved(str(straight / "r")), saved(str(tmp_path / "r"))
    assert set(one) == set(two)
    for key, values in one.items():
        np.testing.assert_allclose(two[key], values, rtol=0, atol=1e-9, err_msg=key)


@pytest.mark.slow
def test_another_way_to_follow_is_another_objective(pools: Any, llama: Path, straight: Path, tmp_path: Path) -> None:
    pools(2).run(live_run, run_tree(llama, tmp_path, 3), ROWS)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()

    for changed in ({"mix": 0.5}, {"every_steps": 1}):
        for kind, words in pools(2).errors(live_run, run_tree(llama, tmp_path, 5, **changed), ROWS):
            assert kind == "CheckpointMismatch"
            assert "objective: reference.sync." in words
            assert "checkpoint.resume.changed: [objective]" in words
    stays = run_tree(llama, tmp_path, 5) | {"reference": {"kind": "offloaded"}}
    stays["checkpoint"] = stays["checkpoint"] | {"resume": {"changed": ["objective"]}}
    ((_, words), _) = pools(2).errors(live_run, stays, ROWS)
    assert "the checkpoint has a reference, and this run has none (allow it with resume.drop)" in words
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before

    stays["checkpoint"]["resume"]["drop"] = ["^reference"]
    pools(2).run(live_run, stays, ROWS)

    assert not [key for key in saved(str(tmp_path / "r")) if key.startswith("reference.")]


def test_auto_tells_what_each_place_takes(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), kl={"coefficient": 0.1})

    ((lines, held), (silent, _)) = pools(2).run(said_of_the_choice, tree, ROWS)
    ((adapted, nothing), _) = pools(2).run(said_of_the_choice, tree | {"model": tree["model"] | {"lora": {}}}, ROWS)

    assert silent == []
    (line,) = lines
    assert line.startswith("reference: auto is sharded, since device and host have one memory, and model.lora is not")
    assert "0 bytes with adapter_off (not here: model.lora is not set)" in line
    assert f"{held / 2**10:.1f} KiB on the device with sharded, {held / 2**10:.1f} KiB in host memory" in line
    assert nothing is None
    assert adapted[0].startswith("reference: auto is adapter_off, since nothing but adapters is trained")


def plan_of(shard_bytes: int, *, cpu_offload: bool = False) -> ShardPlan:
    unit = ShardUnit("layer", ("layer",), ("w",), "shard", 0, reshard=True, bytes_=3 * 2**20, trainable=1)
    return ShardPlan(
        (unit,), (), {}, (), 1, 2, "float32", "float32", reduce_last_only=False, cpu_offload=cpu_offload, sharded=True,
        shard_bytes=shard_bytes, parameters=1, trainable=1,
    )  # fmt: skip


def test_auto_takes_host_memory_where_the_shards_do_not_fit_the_device() -> None:
    gib = 2**30

    assert choose_place(plan_of(2 * gib), "no", 2 * gib)[0] == "sharded"
    assert choose_place(plan_of(2 * gib), "no", 2 * gib - 1) == (
        "offloaded",
        "its shards take 2 GiB per rank, and 2 GiB are free on the device beside the policy",
    )
    assert choose_place(plan_of(2 * gib), "no", None)[0] == "sharded"
    assert choose_place(plan_of(2 * gib, cpu_offload=True), "no", 9 * gib)[0] == "offloaded"
    assert choose_place(plan_of(2 * gib), "", 0)[0] == "adapter_off"
    assert alternatives(plan_of(2 * gib), "") == (
        "Each rank would hold 0 bytes with adapter_off, 2 GiB on the device with sharded, 2 GiB in host memory with "
        "offloaded, which brings up to 3 MiB at a time to the device"
    )
