"""GGUF files of small models of every family: proved by another reader, planted faults found, bad input refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import ModelError
from holdfast.features.served_formats.exporting import ServedExport, prove, written
from holdfast.features.served_formats.proof import Proof
from tests.features.served_formats.directories import FAMILIES, model_directory
from tests.tiny import tiny_directory

LLAMA = os.environ.get("HOLDFAST_LLAMA_PYTHON", "")
"""An interpreter with llama-cpp-python."""


def export(plain: Path, tensor_type: str = "f16") -> Path:
    target = plain.parent / tensor_type
    target.mkdir()
    return written(plain, target, "gguf", tensor_type, "m")


def proof(plain: Path, file: Path, tensor_type: str = "f16", reader: str = "") -> Proof:
    how = ServedExport("gguf", tensor_type, reader=Path(reader) if reader else None)
    return prove(plain, file, how, tensor_type, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_each_family_gives_the_same_numbers(tmp_path: Path, family: str) -> None:
    plain = model_directory(tmp_path / "hf", family, padding=3)

    made = proof(plain, export(plain))

    assert made.is_within, made.verdict
    assert made.largest < 0.02
    assert made.greedy_same >= 15


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA, reason="HOLDFAST_LLAMA_PYTHON names no interpreter with llama-cpp-python")
@pytest.mark.parametrize("tensor_type", ["f16", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_each_family(tmp_path: Path, family: str, tensor_type: str) -> None:
    plain = model_directory(tmp_path / "hf", family, padding=3)

    made = proof(plain, export(plain, tensor_type), tensor_type, LLAMA)

    assert made.is_within, made.verdict
    assert made.largest < {"f16": 0.03, "q8_0": 0.8}[tensor_type]


def test_the_file_holds_tokens_kinds_and_special_tokens(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen2", padding=3)

    reader = gguf.GGUFReader(export(plain))

    tree = json.loads((plain / "tokenizer.json").read_text())
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    kinds = reader.get_field("tokenizer.ggml.token_type").contents()
    assert tokens[: len(tree["model"]["vocab"])] == sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    assert [token.startswith("[PAD") for token in tokens[-4:]] == [False, True, True, True]
    assert (kinds[0], kinds[10], kinds[-1]) == (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED)
    assert reader.get_field("tokenizer.ggml.pre").contents() == "qwen2"
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == tree["model"]["vocab"]["<|im_end|>"]
    assert reader.get_field("tokenizer.ggml.add_bos_token").contents() is False
    assert "generation" not in reader.get_field("tokenizer.chat_template").contents().replace("add_generation", "")


def test_matrices_of_q8_0_are_within_half_a_step(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3", padding=3)

    reader = gguf.GGUFReader(export(plain, "q8_0"))

    matrix = load_file(plain / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].numpy()
    (tensor,) = [tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight"]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    # The scale is rounded to float16: 127 steps of it are off by 0.06 of a step.
    steps = np.abs(matrix.reshape(-1, 32)).max(1) / 127
    assert (np.abs(values - matrix).reshape(-1, 32) <= steps[:, None] * 0.57).all()


def swapped(tensors: dict[str, Any]) -> None:
    first, second = "blk.0.ffn_up.weight", "blk.1.ffn_up.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def transposed(tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_q.weight"] = np.ascontiguousarray(tensors["blk.0.attn_q.weight"].T)


def unpermuted(tensors: dict[str, Any]) -> None:
    name = "blk.0.attn_k.weight"
    tensors[name] = tensors[name].reshape(2, 4, 2, -1).swapaxes(1, 2).reshape(tensors[name].shape)


def rewritten(file: Path, change: Callable[[dict[str, Any]], None], template: str | None = None) -> Path:
    """Write a file anew, with other tensors or another template."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    target = file.with_name("planted.gguf")
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = template if template and name == "tokenizer.chat_template" else field.contents()
            sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], sub_type)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


READERS = [
    "",
    pytest.param(
        LLAMA,
        id="llama.cpp",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not LLAMA, reason="HOLDFAST_LLAMA_PYTHON names no interpreter with llama-cpp-python"),
        ],
    ),
]


@pytest.mark.parametrize("change", [swapped, transposed, unpermuted])
@pytest.mark.parametrize("reader", READERS)
def test_a_planted_tensor_is_found(tmp_path: Path, change: Callable[[dict[str, Any]], None], reader: str) -> None:
    plain = model_directory(tmp_path / "hf", "llama", hidden_size=32)
    file = export(plain)

    sound = proof(plain, rewritten(file, lambda _: None), reader=reader)
    made = proof(plain, rewritten(file, change), reader=reader)

    assert sound.is_within, sound.verdict
    assert not made.is_within
    assert made.largest > 0.3


@pytest.mark.parametrize("reader", READERS)
def test_another_template_is_found(tmp_path: Path, reader: str) -> None:
    plain = model_directory(tmp_path / "hf", "llama")
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"

    made = proof(plain, rewritten(export(plain), lambda _: None, template), reader=reader)

    assert not made.is_within
    assert "row 0 has other tokens by its tokenizer or template" in made.verdict
    assert made.largest < 0.02


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA, reason="HOLDFAST_LLAMA_PYTHON names no interpreter with llama-cpp-python")
def test_llama_cpp_finds_another_split(tmp_path: Path) -> None:
    """One split keeps up to three digits together, the other one cuts between all of them."""
    plain = model_directory(tmp_path / "hf", "llama:3.1")
    file = export(plain)
    data = file.read_bytes()
    key, together, apart = b"tokenizer.ggml.pre", b"llama-bpe", b"stablelm2"
    start = data.index(key) + len(key) + 12
    assert data[start : start + len(together)] == together
    file.write_bytes(data[:start] + apart + data[start + len(apart) :])

    made = proof(plain, file, reader=LLAMA)

    assert not made.is_within
    assert "tokens by its tokenizer" in made.verdict


def refusal(plain: Path) -> str:
    with pytest.raises(ModelError) as raised:
        export(plain)
    return str(raised.value)


def changed_config(plain: Path, **values: Any) -> None:
    file = plain / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_architecture_without_a_form_is_refused_by_name(tmp_path: Path) -> None:
    assert "MistralForCausalLM" in refusal(tiny_directory(tmp_path / "hf", "mistral"))


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3")
    weights = plain / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    save_file({**load_file(weights), name: torch.zeros(2, 32)}, weights, {"format": "pt"})

    assert name in refusal(plain)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3")
    file = plain / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 400, "content": "<more>"})
    file.write_text(json.dumps(tree))

    assert "a token of number 400" in refusal(plain)


def test_a_tied_head_with_numbers_of_its_own_is_refused(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "llama", tie_word_embeddings=False)
    changed_config(plain, tie_word_embeddings=True)

    assert "lm_head.weight" in refusal(plain)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "llama", tie_word_embeddings=True)

    names = {tensor.name for tensor in gguf.GGUFReader(export(plain)).tensors}

    assert "token_embd.weight" in names
    assert "output.weight" not in names


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar is 99"),
        ("gemma2", {"layer_types": ["full_attention"] * 4}, "layers with a window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_a_value_that_llama_cpp_lacks_is_refused(
    tmp_path: Path, family: str, values: dict[str, Any], words: str
) -> None:
    plain = model_directory(tmp_path / "hf", family)
    changed_config(plain, **values)

    assert words in refusal(plain)


def test_a_number_beyond_float16_is_refused(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "hf", "qwen3")
    weights = plain / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 70_000.0
    save_file(tensors, weights, {"format": "pt"})

    assert "7e+04" in refusal(plain)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    plain = tiny_directory(tmp_path / "hf", "llama")

    assert "tokenizer of the kind WordLevel" in refusal(plain) or "splits texts by" in refusal(plain)
