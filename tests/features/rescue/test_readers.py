"""Checkpoints that other systems' own code wrote are read bitwise, without running them, and continue as there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from holdfast.features.rescue.reading.alignment import align, rename
from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from holdfast.models.names import canonical_name, named_parameters, tied_names
from tests.archives import unpack
from tests.features.rescue.reading import ARCHIVE, hash_of, place_of, read_archive, truth_of

SIZES = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
TRAINER = "transformers' Trainer (or TRL)"
WHOSE = {
    "dcp": ("plain DCP", None),
    "dcp-4": ("plain DCP", None),
    "dcp-flat-tied": ("plain DCP", None),
    "dcp-lora": ("plain DCP", None),
    "dcp-moe": ("plain DCP", None),
    "verl-fsdp2": ("verl", 2),
    "verl-fsdp2-4": ("verl", 4),
    "verl-fsdp2-1": ("verl", 1),
    "verl-fsdp2-lora": ("verl", 2),
    "verl-fsdp2-moe": ("verl", 2),
    "verl-fsdp2-tied": ("verl", 2),
    "verl-fsdp2-poison": ("verl", 2),
    "verl-fsdp1-flat": ("verl", 2),
    "verl-fsdp1-orig": ("verl", 2),
    "verl-fsdp1-orig-4": ("verl", 4),
    "verl-fsdp1-nomesh": ("verl", 2),
    "accelerate-v1-sharded": ("accelerate", 2),
    "accelerate-v2-sharded": ("accelerate", 2),
    "accelerate-v2-sharded-1": ("accelerate", 1),
    "accelerate-v2-moe": ("accelerate", 2),
    "accelerate-v2-full": ("accelerate", 2),
    "accelerate-v2-full-4": ("accelerate", 4),
    "trainer-sharded": (TRAINER, 2),
    "trainer-sharded-1": (TRAINER, 1),
    "trainer-sharded-4": (TRAINER, 4),
    "trainer-sharded-lora": (TRAINER, 2),
    "trainer-full": (TRAINER, 2),
    "trainer-full-tied": (TRAINER, 2),
    "trl-sharded": (TRAINER, 2),
    "trl-full": (TRAINER, 2),
    "lightning-mp-sharded": ("Lightning", None),
    "lightning-mp-sharded-4": ("Lightning", None),
    "lightning-mp-frozen": ("Lightning", None),
    "lightning-mp-lora": ("Lightning", None),
    "lightning-mp-full": ("Lightning", None),
    "lightning-mp-weights": ("Lightning", None),
    "lightning-fsdp-sharded": ("Lightning", None),
    "lightning-fsdp-sharded-4": ("Lightning", None),
    "titan": ("torchtitan", 2),
    "titan-1": ("torchtitan", 1),
    "titan-4": ("torchtitan", 4),
    "titan-frozen": ("torchtitan", 2),
}


ADAPTERS_ALONE = "trainer-sharded-lora"
"""Of which the Trainer saves no base weights."""


def opened(fixture: Path) -> ForeignCheckpoint:
    checkpoint = open_foreign(place_of(fixture))
    examine(checkpoint)
    return checkpoint


def plain_model(name: str) -> Any:
    """Return a model of a fixture's form, with other weights."""
    torch.manual_seed(1)
    if "moe" in name:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings="tied" in name))
    if "lora" in name:
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]), model)
    return model


def plain(name: str) -> str:
    """Return a parameter's name without peft's marks."""
    return canonical_name(name.removeprefix("base_model.model."))


def truth_by_plain_names(fixture: Path) -> dict[str, Any]:
    truth = truth_of(fixture)
    return truth | {part: {plain(name): value for name, value in truth[part].items()} for part in ("model", "optim")}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", WHOSE)
def test_every_tensor_is_bitwise_what_the_source_held(fixtures: Path, name: str) -> None:
    before, truth = hash_of(fixtures / name), truth_by_plain_names(fixtures / name)

    checkpoint = opened(fixtures / name)
    rename(checkpoint, plain)

    assert (checkpoint.system, checkpoint.world_size) == WHOSE[name]
    assert not checkpoint.of_kind("damage")
    assert checkpoint.step == 2 or name == "lightning-mp-weights"
    saved = {key: value for key, value in truth["model"].items() if name != ADAPTERS_ALONE or "lora_" in key}
    assert saved.keys() <= checkpoint.weights.keys() | checkpoint.tied_away.keys()
    for parameter, value in saved.items():
        stored = checkpoint.weights[parameter].read()
        assert stored.dtype == value.dtype
        assert torch.equal(stored, value), parameter
    if name != "lightning-mp-weights":
        assert set(checkpoint.states) == set(truth["optim"])
    for parameter, slots in checkpoint.states.items():
        for slot, value in truth["optim"][parameter].items():
            assert torch.equal(slots[slot].read(), torch.as_tensor(value)), (parameter, slot)
    assert hash_of(fixtures / name) == before


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", [name for name in WHOSE if name != "lightning-mp-weights"])
def test_the_next_losses_are_those_of_the_systems_own_resume(fixtures: Path, name: str) -> None:
    checkpoint, truth = opened(fixtures / name), truth_by_plain_names(fixtures / name)
    ranks = 4 if name.endswith("-4") else 1 if name.endswith("-1") else 2
    model = plain_model(name)
    align(checkpoint, set(named_parameters(model)), tied_names(model))
    parameters = named_parameters(model)

    with torch.no_grad():
        for parameter, value in parameters.items():
            stored = checkpoint.weights.get(parameter)
            assert stored is not None or (name == ADAPTERS_ALONE and "lora_" not in parameter)
            value.copy_(truth["model"][parameter] if stored is None else stored.read())
    settings = next(group.settings for group in checkpoint.groups if group.names)
    trained = [parameters[parameter] for parameter in checkpoint.states]
    chosen = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(trained, **chosen)
    for parameter, slots in checkpoint.states.items():
        optimizer.state[parameters[parameter]] = {slot: value.read() for slot, value in slots.items()}
    losses = []
    for step in (2, 3):
        rows = (
            truth["batches"][step - 2].chunk(ranks)
            if "batches" in truth
            else [batch(step, rank) for rank in range(ranks)]
        )
        total = sum(model(input_ids=ids, labels=ids).loss for ids in rows) / ranks
        model.zero_grad()
        total.backward()
        for each in model.parameters():
            if not any(each is one for one in trained):
                each.grad = None
        optimizer.step()
        losses.append(float(total.detach()))

    assert losses == pytest.approx(truth["next"], abs=1e-6)


def test_the_state_that_easyr1_kept_in_bfloat16_is_bitwise_that_of_its_ranks(fixtures: Path) -> None:
    checkpoint, truth = opened(fixtures / "easyr1_adamw_bf16_frozen"), truth_of(fixtures / "easyr1_adamw_bf16_frozen")

    assert checkpoint.system == "EasyR1"
    assert not checkpoint.of_kind("damage")
    for name, value in truth["model"].items():
        assert torch.equal(checkpoint.weights[name].read(), value), name
    assert set(checkpoint.states) == {name for rank in truth["raw"] for name in rank}
    for name, slots in checkpoint.states.items():
        assert set(slots) == {"step", "exp_avg", "exp_avg_sq", "compensation"}
        for slot in ("exp_avg", "exp_avg_sq", "compensation"):
            runs = [rank[name][slot].flatten() for rank in truth["raw"] if slot in rank.get(name, {})]
            stored = slots[slot].read()
            assert stored.dtype == torch.bfloat16
            assert torch.equal(stored.flatten(), torch.cat(runs)), (name, slot)


def test_a_tensor_that_is_cut_by_columns_is_put_together(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    whole = torch.arange(30.0).reshape(5, 6)
    for rank, columns in enumerate(whole.split(3, dim=1)):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
        value = DTensor.from_local(columns.contiguous(), mesh, [Shard(1)], run_check=False)
        torch.save({"weight": value}, actor / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()

    stored = open_foreign(actor).weights["weight"].read()

    assert torch.equal(stored, whole)


def test_meshes_that_torch_2_6_pickled_are_read(tmp_path: Path) -> None:
    """Of a mesh only what it recorded counts; later versions of torch pickle other attributes (`torch_2_6.py`)."""
    folder = unpack(ARCHIVE.with_name("torch_2_6.tar.xz"), tmp_path)
    truth = truth_of(folder)

    checkpoint = opened(folder)

    assert (checkpoint.verdict, checkpoint.world_size, checkpoint.step) == ("whole", 4, 2)
    assert checkpoint.weights.keys() == truth["model"].keys() == checkpoint.states.keys()
    for name, value in truth["model"].items():
        assert torch.equal(checkpoint.weights[name].read(), value), name
        assert len(checkpoint.weights[name].copies) == 2
        for slot, state in truth["optim"][name].items():
            assert torch.equal(checkpoint.states[name][slot].read(), state), (name, slot)


def test_the_manifest_names_what_wrote_each_fixture_and_every_file_of_it() -> None:
    folder = read_archive()
    manifest = json.loads(folder.pop("manifest.json"))

    assert set(manifest) == {*WHOSE, "easyr1_adamw_bf16_frozen"}
    for name, entry in manifest.items():
        assert entry["version"] or "commit" in entry["package"]
        files = {path: data for path, data in folder.items() if path.startswith(f"{name}/")}
        assert {f"{name}/{path}": digest for path, digest in entry["files"].items()} == {
            path: hashlib.sha256(data).hexdigest() for path, data in files.items()
        }
