"""Which layers get an adapter, where peft reads a path as something else."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.sections.model import LoRAConfig
from holdfast.errors import ModelError
from holdfast.models.adapters.live import adapters_of, whole_modules
from holdfast.models.adapters.lora import add_adapters
from tests.models.architectures import settings_of
from tests.tiny import tiny_model


def test_layers_that_peft_takes_for_experts_are_left_out_with_a_note() -> None:
    model = tiny_model("glm4_moe", **settings_of("glm4_moe"))

    note = add_adapters(model, LoRAConfig(rank=4))

    attention = {f"model.layers.{n}.self_attn.{m}_proj.weight" for n in (0, 1) for m in "qkvo"}
    assert set(adapters_of(model)) == attention
    # q and o: 4 x (32 + 32), k and v: 4 x (32 + 16), in two layers
    assert note == (
        "lora: rank 4 on 8 layers, 1,792 parameters trained; 6 left out, which peft takes for experts "
        "(model.layers.0.mlp.gate_proj and 5 more)"
    )


def test_a_pattern_that_names_them_is_refused() -> None:
    model = tiny_model("glm4_moe", **settings_of("glm4_moe"))

    with pytest.raises(ModelError, match=r"peft takes model\.layers\.0\.mlp\.gate_proj and 5 more for experts"):
        add_adapters(model, LoRAConfig(targets=["mlp.*_proj", "q_proj"]))


def test_matrices_of_gpt_2_get_adapters() -> None:
    model = tiny_model("gpt2")

    note = add_adapters(model, LoRAConfig(rank=4, ranks={"c_attn": 2}))

    layers = [
        f"transformer.h.{n}.{m}" for n in (0, 1) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert set(adapters_of(model)) == {f"{layer}.weight" for layer in layers}
    # of each block: c_attn 2 x (32 + 96), c_proj 4 x (32 + 32), c_fc and c_proj 4 x (32 + 128)
    assert note == f"lora: rank 4 on 8 layers, {2 * (256 + 256 + 640 + 640):,} parameters trained"


def nemotron() -> Any:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
    kinds = ["mamba", "attention", "mlp"]
    return tiny_model("nemotron_h", num_hidden_layers=3, layers_block_type=kinds, head_dim=8, **sizes)


def test_matrices_that_peft_refuses_beside_mamba_layers_are_left_out_with_a_note() -> None:
    model = nemotron()

    note = add_adapters(model, LoRAConfig(rank=4))

    assert "model.layers.0.mixer.in_proj.weight" in adapters_of(model)
    assert note.endswith("; 1 left out, which peft refuses in this architecture (model.layers.0.mixer.out_proj)")


def test_a_pattern_that_names_them_is_refused_by_our_key() -> None:
    words = r"model\.lora\.targets: peft refuses model\.layers\.0\.mixer\.out_proj.*model\.lora\.exclude: \[out_proj\]"
    with pytest.raises(ModelError, match=words) as caught:
        add_adapters(nemotron(), LoRAConfig(targets=["q_proj", "out_proj"]))

    assert "target_modules" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"targets": ["q_proj", "query"]},
            r"model\.lora\.targets: 'query' matches no linear layer\. They look like model\.layers\.0\.mlp\.down_proj",
        ),
        ({"targets": ["lm_head"]}, r"model\.lora\.targets: 'lm_head' matches no linear layer"),
        ({"exclude": ["layer.1"]}, r"model\.lora\.exclude: 'layer\.1' matches nothing .*model\.layers\.0\.mlp"),
        ({"ranks": {"qproj": 8}}, r"model\.lora\.ranks: 'qproj' matches nothing that would get an adapter"),
        (
            {"exclude": ["self_attn"], "ranks": {"q_proj": 8}},
            r"model\.lora\.ranks: 'q_proj' matches nothing that would get an adapter\. Such are model\.layers\.0\.mlp",
        ),
        ({"exclude": ["."]}, r"model\.lora leaves no layer to adapt"),
    ],
)
def test_patterns_that_do_nothing_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        add_adapters(tiny_model("llama"), LoRAConfig.model_validate(section))


def test_patterns_of_stacks_alone_are_known_as_well() -> None:
    model = tiny_model("mixtral")
    section = LoRAConfig.model_validate({"experts": "all", "exclude": ["gate_up_proj"], "ranks": {"down_proj": 2}})

    add_adapters(model, section)

    laid = set(adapters_of(model))
    assert {name for name in laid if "experts" in name} == {
        f"model.layers.{number}.mlp.experts.down_proj" for number in (0, 1)
    }


@pytest.mark.parametrize("patterns", [["."], ["norm", "embed_tokens", "proj", "lm_head"]])
def test_training_every_matrix_whole_beside_adapters_is_refused(patterns: list[str]) -> None:
    model = tiny_model("llama")

    with pytest.raises(ModelError, match=r"model\.lora\.train: \['.*'\] leaves no matrix of the model frozen"):
        add_adapters(model, LoRAConfig(train=patterns))


def test_some_matrices_may_be_trained_whole_beside_adapters() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)

    add_adapters(model, LoRAConfig(train=["norm", "embed_tokens"]))

    trained = {name for name, value in model.named_parameters() if value.requires_grad and ".lora_" not in name}
    norms = {
        f"model.layers.{layer}.{kind}_layernorm.weight" for layer in (0, 1) for kind in ("input", "post_attention")
    }
    assert trained == {"model.embed_tokens.weight", "model.norm.weight"} | norms


@pytest.mark.parametrize(
    ("model_type", "train", "expected"),
    [
        ("deepseek_v3", [r"layers\.1\.input_layernorm"], {"model.layers.1.input_layernorm": ["weight"]}),
        ("deepseek_v3", [r"mlp\.gate\."], None),  # a stored buffer corrects its choices
        ("qwen2", [r"0\.self_attn\.q_proj\.bias"], None),  # part of a layer
        ("gemma2", ["embed_tokens"], None),  # tied to the head
    ],
)
def test_modules_that_are_trained_whole_are_those_that_peft_can_put_together_again(
    model_type: str, train: list[str], expected: dict[str, list[str]] | None
) -> None:
    model = tiny_model(model_type, **settings_of(model_type))
    add_adapters(model, LoRAConfig(targets=["o_proj"], train=train))

    found = whole_modules(model)

    wanted = expected and {path: [f"{path}.{name}" for name in names] for path, names in expected.items()}
    assert found == wanted
