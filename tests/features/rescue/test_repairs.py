"""Each repair: what is said of it, and that what comes out is what the source would have gone on with."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from holdfast.errors import HoldfastError
from holdfast.features.rescue.reading.examine import examine
from holdfast.features.rescue.reading.recognise import open_foreign
from tests.features.rescue.damages import rank_file, state_of
from tests.features.rescue.reading import place_of, truth_of
from tests.features.rescue.test_damage import copied
from tests.features.rescue.test_import import imported, run_file, stored_at, tokens
from tests.features.rescue.test_readers import SIZES

__all__ = ["tokens"]  # a fixture of these tests, too
STORED = "runs/rescued/checkpoints/step-00000002"


def test_empty_entries_of_a_frozen_tower_are_dropped(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    """Report 000: verl's own offloading reads `optimizer.state[parameter]`, which leaves an entry for each."""
    said = imported(place_of(fixtures / "verl-fsdp2-poison"), "--as", run_file(tmp_path, tokens))

    stored = stored_at(tmp_path / STORED)
    assert "empty entries in the optimizer's state" in said
    assert "report 000" in said
    names = {name.removeprefix("optim.").rpartition(".")[0] for name in stored.manifest.tensors if "optim." in name}
    assert names == set(truth_of(fixtures / "verl-fsdp2-poison")["optim"])
    assert not any("layers.0." in name for name in names)


def test_the_padding_of_flat_parameters_is_left_behind(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, tokens, model__freeze=[])

    imported(place_of(fixtures / "verl-fsdp1-flat"), "--as", file)

    stored, truth = stored_at(tmp_path / STORED), truth_of(fixtures / "verl-fsdp1-flat")
    for name, slots in truth["optim"].items():
        assert torch.equal(stored.read(f"optim.{name}.exp_avg"), slots["exp_avg"]), name


def bfloat16_moments(content: Any) -> None:
    for slots in content["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in slots:
                slots[key] = in_bfloat16(slots[key])


def in_bfloat16(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in bfloat16, on the mesh that its file names.

    What DTensor's own `to` returns is on the mesh of an equal tensor that was cast before: on another rank's.
    """
    if not isinstance(value, DTensor):
        return value.to(torch.bfloat16)
    meta = value._spec.tensor_meta
    assert meta is not None
    spec = dataclasses.replace(value._spec, tensor_meta=meta._replace(dtype=torch.bfloat16))
    return DTensor(value._local_tensor.to(torch.bfloat16), spec, requires_grad=False)  # type: ignore[no-any-return]


@pytest.mark.cases("all")
@pytest.mark.parametrize("fixture", ["verl-fsdp2", "verl-fsdp1-orig"])
def test_states_in_bfloat16_beside_a_frozen_tower_in_float32_are_widened(
    fixtures: Path, tokens: Path, fixture: str, tmp_path: Path
) -> None:
    path = copied(fixtures, fixture, tmp_path)
    for rank in range(2):
        state_of(rank_file(path, "optim", rank), bfloat16_moments)

    imported(path, "--as", run_file(tmp_path, tokens))

    stored, truth = stored_at(tmp_path / STORED), truth_of(fixtures / fixture)
    for name, slots in truth["optim"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(stored.read(f"optim.{name}.{key}"), slots[key].to(torch.bfloat16).float()), (name, key)


def test_a_dtype_among_the_settings_of_a_group_is_read(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    """Report 001: torch's own gathering fails on it."""
    path = copied(fixtures, "verl-fsdp2", tmp_path)
    for rank in range(2):
        state_of(
            rank_file(path, "optim", rank),
            lambda content: content["param_groups"][0].update(momentum_dtype=torch.bfloat16),
        )

    said = imported(path, "--as", run_file(tmp_path, tokens))

    assert "torch.dtype (momentum_dtype)" in said
    assert "report 001" in said
    assert stored_at(tmp_path / STORED).manifest.step == 2


def merged_directory(folder: Path, tokens: Path, *, alike: bool = True) -> Path:
    """Return a model directory as a merger leaves it that puts a buffer of each rank behind the other's."""
    shutil.copytree(tokens, folder)
    weights = load_file(folder / "model.safetensors")
    frequencies = Qwen2ForCausalLM(Qwen2Config(**SIZES)).model.rotary_emb.inv_freq
    other = frequencies if alike else frequencies + 1
    weights["model.rotary_emb.inv_freq"] = torch.cat([frequencies, other]).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_buffer_of_every_rank_in_a_row_is_taken_once(tokens: Path, tmp_path: Path) -> None:
    path = merged_directory(tmp_path / "merged", tokens)

    said = imported(path, "--export", tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    assert "buffer model.rotary_emb.inv_freq is there 2 times" in said
    first = load_file(tokens / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in first.items())


def test_buffers_in_a_row_that_differ_are_damage(tokens: Path, tmp_path: Path) -> None:
    path = merged_directory(tmp_path / "merged", tokens, alike=False)

    checkpoint = open_foreign(path)
    examine(checkpoint)

    assert "its parts differ" in checkpoint.of_kind("damage")[0].text


@pytest.mark.cases("all")
@pytest.mark.parametrize("fixture", ["dcp-flat-tied", "verl-fsdp2-tied", "trainer-full-tied"])
def test_tied_weights_that_were_saved_twice_are_written_once(
    fixtures: Path, tokens: Path, fixture: str, tmp_path: Path
) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(tokens, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    said = imported(place_of(fixtures / fixture), "--export", tmp_path / "out", "--model", tied)

    written = load_file(tmp_path / "out/model.safetensors")
    assert "lm_head.weight" not in written
    assert torch.equal(
        written["model.embed_tokens.weight"], truth_of(fixtures / fixture)["model"]["model.embed_tokens.weight"]
    )
    assert "saved twice; one of them is written" in said or fixture == "trainer-full-tied"


def test_tied_weights_that_differ_are_refused(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(tokens, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    with pytest.raises(HoldfastError, match="hold different numbers"):
        imported(place_of(fixtures / "dcp"), "--export", tmp_path / "out", "--model", tied)

    assert not (tmp_path / "out").exists()


def test_what_a_directory_lacks_beside_its_weights_comes_from_the_model(
    fixtures: Path, tokens: Path, tmp_path: Path
) -> None:
    place = place_of(fixtures / "verl-fsdp2")

    with pytest.raises(HoldfastError, match="no tokenizer beside it.*--model"):
        imported(place, "--export", tmp_path / "bare")
    said = imported(place, "--export", tmp_path / "out", "--model", tokens)

    assert "lacks a generation configuration" in said
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        each.name for each in (tmp_path / "out").iterdir()
    }
    assert not (tmp_path / "bare").exists()
