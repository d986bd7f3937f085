"""Model directories that do not fit or are damaged are refused, and the tensor or file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import ModelError
from tests.models.directories import filled, tensors_in, write_directory


def damage(tmp_path: Path, kind: str = "llama", **options: Any) -> Path:
    write_directory(tmp_path, kind, **options)
    return tmp_path


def rewrite(directory: Path, change: Any) -> None:
    tensors = tensors_in(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    rewrite(damage(tmp_path), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(ModelError, match=r"1 missing tensors \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        filled(tmp_path)


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_a_missing_expert_is_named(tmp_path: Path, part: str) -> None:
    name = f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"
    rewrite(damage(tmp_path, "mixtral"), lambda tensors: tensors.pop(name))

    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts\.(gate_up_proj|down_proj)"):
        filled(tmp_path)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    rewrite(damage(tmp_path), lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(2)}))

    with pytest.raises(ModelError, match=r"1 tensors the model does not know \(model\.layers\.0\.extra\.weight\)"):
        filled(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    rewrite(damage(tmp_path), lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))

    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[31\], the model wants \[32\].*config\.json"):
        filled(tmp_path)


def test_nothing_is_counted_twice_when_many_tensors_are_wrong(tmp_path: Path) -> None:
    rewrite(damage(tmp_path), lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name])

    with pytest.raises(ModelError, match=r"6 missing tensors \(.*and 2 more\)"):
        filled(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    damage(tmp_path, max_shard_size=20_000)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()

    with pytest.raises(ModelError, match=rf"lacks {victim.name}, which model\.safetensors\.index\.json names"):
        filled(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = damage(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(ModelError, match=r"model\.safetensors (is no safetensors file|holds \d+ bytes, its header)"):
        filled(tmp_path)


def with_header(path: Path, header: bytes) -> None:
    old = path.read_bytes()
    data = old[8 + int.from_bytes(old[:8], "little") :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"\\xff\\xfe\\x00",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    with_header(damage(tmp_path) / "model.safetensors", header)

    with pytest.raises(ModelError, match=r"model\.safetensors has a damaged header"):
        filled(tmp_path)


def test_a_dtype_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    with_header(damage(tmp_path) / "model.safetensors", b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}')

    with pytest.raises(ModelError, match=r"model\.safetensors holds tensors of dtype F4"):
        filled(tmp_path)


def test_pickled_weights_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    damage(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"It has pytorch_model\.bin: load and save it once with transformers"):
        filled(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    damage(tmp_path, max_shard_size=20_000)
    (tmp_path / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is damaged"):
        filled(tmp_path)


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    index = damage(tmp_path, max_shard_size=20_000) / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    other = next(file for file in tree["weight_map"].values() if file != tree["weight_map"]["model.norm.weight"])
    tree["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(tree))

    with pytest.raises(ModelError, match=rf"says that model\.norm\.weight is in .*{other}, and it is not"):
        filled(tmp_path)
