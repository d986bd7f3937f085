"""FP8 and INT8 weights of small models: proved by compressed-tensors' own decompression, planted faults found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import ModelError
from holdfast.features.served_formats.exporting import ServedExport, prove, written
from tests.features.served_formats.directories import model_directory

FORM = "compressed-tensors"


def export(plain: Path, tensor_type: str) -> Path:
    target = plain.parent / tensor_type
    target.mkdir()
    return written(plain, target, FORM, tensor_type, "m")


@pytest.mark.parametrize("tensor_type", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_each_type_is_within_its_limits(tmp_path: Path, family: str, tensor_type: str) -> None:
    plain = model_directory(tmp_path / "hf", family)

    made = prove(plain, export(plain, tensor_type), ServedExport(FORM, tensor_type), tensor_type, {})

    assert made.is_within, made.verdict
    assert 0 < made.mean < 0.25


@pytest.mark.parametrize(("tensor_type", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_rows_times_their_scales_are_the_matrix(tmp_path: Path, tensor_type: str, dtype: torch.dtype) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3")

    tensors = load_file(export(plain, tensor_type) / "model.safetensors")

    name = "model.layers.1.mlp.up_proj.weight"
    matrix = load_file(plain / "model.safetensors")[name]
    assert tensors[name].dtype == dtype
    assert tensors[f"{name}_scale"].shape == (matrix.shape[0], 1)
    back = tensors[name].to(torch.float32) * tensors[f"{name}_scale"]
    # Of 8 bits: 127 steps on each side; of e4m3: three bits behind the first.
    largest = matrix.abs().amax(1, keepdim=True)
    step = largest / 127 if tensor_type == "int8" else (matrix.abs() / 8).clamp(min=largest / 448 / 64)
    assert ((back - matrix).abs() <= step * 0.51).all()
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32


def test_the_configuration_says_how_to_read_it(tmp_path: Path) -> None:
    target = export(model_directory(tmp_path / "hf", "qwen3"), "int8")

    section = json.loads((target / "config.json").read_text())["quantization_config"]

    assert (section["quant_method"], section["format"]) == (FORM, "int-quantized")
    assert section["ignore"] == ["lm_head"]
    assert section["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert (target / "tokenizer.json").exists()


def test_swapped_matrices_are_found(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "llama")
    target = export(plain, "int8")
    weights = target / "model.safetensors"
    tensors = load_file(weights)
    for end in ("weight", "weight_scale"):
        names = [f"model.layers.{layer}.mlp.up_proj.{end}" for layer in (0, 1)]
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    save_file(tensors, weights, {"format": "pt"})

    made = prove(plain, target, ServedExport(FORM, "int8"), "int8", {})

    assert not made.is_within
    assert made.mean > 0.25


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3")
    weights = plain / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})

    with pytest.raises(ModelError, match="not finite"):
        export(plain, "fp8")
