"""A model is built as its configuration says, and what cannot be built is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.config.sections.model import ModelConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.errors import ModelError
from holdfast.models.files.configuration import sub_configs
from holdfast.models.layers.attention import PACKED
from holdfast.models.names import POLICY_PREFIX
from holdfast.models.setup.freezing import freeze
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.parallel.shards import check_buffers
from tests.models.architectures import strong_model
from tests.models.cases import whole_parameters
from tests.models.directories import KINDS, filled, model_of, write_directory
from tests.tiny import COMMON
from tests.vision import vision_model

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def planned(config: ModelConfig, **options: Any) -> Blueprint:
    return blueprint(config, Path.cwd(), seed=0, **options)


def from_values(**values: Any) -> ModelConfig:
    values = COMMON | {"model_type": "llama"} | values
    return ModelConfig(config=values, tokenizer="builtin:characters")


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_no_checkpoint_holds_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    expected = dict(write_directory(tmp_path, kind).named_buffers())

    policy, _ = filled(tmp_path)

    found = dict(policy.language_model.named_buffers())
    assert set(found) == set(expected)
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype, name
        assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize(
    ("values", "ends"), [({}, 1), ({"eos_token_id": [3, 4]}, [3, 4]), ({"eos_token_id": None}, None)]
)
def test_a_random_start_ends_where_its_tokenizer_ends_unless_told_otherwise(values: dict[str, Any], ends: Any) -> None:
    """Llama's own default is 2."""
    silent = {name: value for name, value in COMMON.items() if not name.endswith("_token_id")}
    config = silent | {"model_type": "llama"} | values
    origin = planned(ModelConfig(config=config, tokenizer="builtin:characters"))

    assert origin.tokenizer.eos_token_id == 1
    assert origin.original_config.eos_token_id == ends
    assert origin.skeleton.generation_config.eos_token_id == ends


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rotary_frequencies_are_those_of_transformers(tmp_path: Path, rope: str) -> None:
    saved = write_directory(tmp_path, "llama", rope_parameters=ROPES[rope] | {"rope_theta": 500.0})

    policy, _ = filled(tmp_path)

    found = policy.language_model.model.rotary_emb  # type: ignore[union-attr]
    plain = strong_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}).model.rotary_emb
    assert torch.equal(found.inv_freq, saved.model.rotary_emb.inv_freq)
    assert not torch.equal(found.inv_freq, plain.inv_freq)


def corrupt(policy: nn.Module) -> None:
    policy.get_buffer(f"{POLICY_PREFIX}model.rotary_emb.inv_freq")[1] += 1e-6


def cast(policy: nn.Module) -> None:
    policy.to(torch.bfloat16)


@pytest.mark.parametrize("change", [corrupt, cast])
def test_a_changed_buffer_is_named(tmp_path: Path, change: Any) -> None:
    write_directory(tmp_path, "llama")
    policy, origin = filled(tmp_path)

    change(policy)

    with pytest.raises(ModelError, match=r"The buffer model\.rotary_emb\.inv_freq .* differs"):
        check_buffers(policy, origin.buffers)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_tied_embeddings_stay_one_parameter(tmp_path: Path, kind: str) -> None:
    write_directory(tmp_path, kind, tie_word_embeddings=True)

    model = filled(tmp_path)[0].language_model

    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


def test_tied_embeddings_stay_one_parameter_on_two_ranks(pools: Any, tmp_path: Path) -> None:
    saved = write_directory(tmp_path, "llama", tie_word_embeddings=True)

    for parameters, ties in pools(2).run(whole_parameters, {"path": str(tmp_path)}):
        assert ties == {"model.embed_tokens.weight": ("lm_head.weight",)}
        expected = saved.get_input_embeddings().weight.detach().double()
        assert torch.equal(torch.from_numpy(parameters["model.embed_tokens.weight"]), expected)


def test_freezing_matches_names_by_pattern() -> None:
    model = planned(from_values(model_type="llama")).model

    freeze(model, [r"embed_tokens", r"layers\.1\.mlp\."])

    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert frozen == {"model.embed_tokens.weight", *(f"model.layers.1.mlp.{part}.weight" for part in parts)}


WORDS: dict[str, dict[str, set[str]]] = {
    "qwen3_vl": {
        "vision_tower": {"visual.patch_embed", "visual.pos_embed", "visual.blocks"},
        "projector": {"visual.merger", "visual.deepstack_merger_list"},
    },
    "qwen2_5_vl": {"vision_tower": {"visual.patch_embed", "visual.blocks"}, "projector": {"visual.merger"}},
    "llava": {"vision_tower": {"vision_tower"}, "projector": {"multi_modal_projector"}},
    "gemma3": {"vision_tower": {"vision_tower"}, "projector": {"multi_modal_projector"}},
}
"""What each word of `model.freeze` means, as paths under `model.`."""


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("word", ["vision_tower", "projector", "language_model", "embeddings"])
def test_a_word_freezes_one_part_of_a_model_that_sees(kind: str, word: str) -> None:
    model = vision_model(kind)

    freeze(model, [word])

    parts = WORDS[kind] | {"language_model": {"language_model"}, "embeddings": {"language_model.embed_tokens"}}
    meant = tuple(f"model.{part}." for part in parts[word]) + (("lm_head.",) if word == "language_model" else ())
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(meant)}
    assert all(any(name.startswith(part) for name in frozen) for part in meant)


def test_frozen_embeddings_take_a_tied_head_with_them() -> None:
    model = planned(from_values(tie_word_embeddings=True)).model

    freeze(model, ["embeddings"])

    assert not model.lm_head.weight.requires_grad
    assert sum(not value.requires_grad for value in model.parameters()) == 1


def test_a_word_for_a_part_that_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match=r"freeze: 'vision_tower' matches no parameter.*Words of their own: vision_t"):
        planned(from_values().model_copy(update={"freeze": ["vision_tower"]}))


def test_freezing_all_parts_by_word_is_refused() -> None:
    with pytest.raises(ModelError, match=r"leaves no parameter to train"):
        freeze(vision_model("llava"), ["vision_tower", "projector", "language_model"])


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    config = from_values().model_copy(update={"freeze": ["model.embed_token.weight"]})

    with pytest.raises(
        ModelError, match=r"freeze: 'model\.embed_token\.weight' matches no.*model\.embed_tokens\.weight"
    ):
        planned(config)


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ModelError, match=r"leaves no parameter to train"):
        planned(from_values().model_copy(update={"freeze": ["."]}))


DROPPING: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4},
}


def two_forwards(kind: str, *, dropout: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoConfig

    from holdfast.models.heads.policy import PolicyModel
    from holdfast.parallel.shards import materialise

    values = {"model_type": kind} | DROPPING[kind]
    known = vars(AutoConfig.for_model(kind))
    values |= {name: value for name, value in COMMON.items() if name in known}
    config = ModelConfig(config=values, tokenizer="builtin:characters", dropout=dropout, attention="sdpa")
    origin = planned(config)
    policy = PolicyModel(origin.model, origin.family, origin.family.head_spec(float32_product=False, chunk_tokens=None))
    materialise(policy, origin.source, origin.buffers, torch.device("cpu"))
    policy.train()
    tokens = torch.arange(2, 22)[None]
    first, second = (policy.language_model(input_ids=tokens).logits.detach() for _ in range(2))
    return first, second


@pytest.mark.parametrize("kind", DROPPING)
def test_training_is_without_noise_unless_dropout_is_kept(kind: str) -> None:
    torch.manual_seed(0)

    quiet, noisy = two_forwards(kind, dropout=False), two_forwards(kind, dropout=True)

    assert torch.equal(*quiet)
    assert not torch.equal(*noisy)


def test_the_cache_is_off_in_every_part_of_the_configuration(tmp_path: Path) -> None:
    write_directory(tmp_path, "gemma3")

    origin = planned(ModelConfig(path=str(tmp_path)))

    assert [part.use_cache for part in sub_configs(origin.model.config)] == [False, False, False]
    assert origin.original_config.get_text_config().use_cache is True  # an export is used for generation


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps", 1e-3),
        ({"rope_scaling": ROPES["linear"]}, "rope_parameters", ROPES["linear"] | {"rope_theta": 500.0}),
        ({"rope_parameters": ROPES["linear"]}, "rope_parameters", ROPES["linear"] | {"rope_theta": 500.0}),
        ({"rope_theta": 9.0}, "rope_parameters", {"rope_type": "default", "rope_theta": 9.0}),
        ({"rope_parameters.rope_theta": 9.0}, "rope_parameters", {"rope_type": "default", "rope_theta": 9.0}),
    ],
    ids=str,
)
def test_overrides_reach_the_model_and_the_export(
    tmp_path: Path, overrides: dict[str, Any], name: str, value: Any
) -> None:
    write_directory(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})

    origin = planned(ModelConfig(path=str(tmp_path), config_override=overrides))

    assert getattr(origin.model.config, name) == value
    assert getattr(origin.original_config, name) == value
    factor = 4.0 if "factor" in str(value) else 1.0
    theta = 9.0 if "9.0" in str(value) else 500.0
    expected = theta ** -(torch.arange(0, 8, 2) / 8) / factor
    torch.testing.assert_close(origin.buffers["model.rotary_emb.inv_freq"], expected)


def test_dotted_overrides_reach_sub_configurations(tmp_path: Path) -> None:
    write_directory(tmp_path, "gemma3")

    origin = planned(ModelConfig(path=str(tmp_path), config_override={"text_config.final_logit_softcapping": 7.0}))

    assert origin.model.config.text_config.final_logit_softcapping == 7.0
    assert origin.family.logit_softcap == 7.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm_epsilon": 1e-3}, r"LlamaConfig has no field rms_norm_epsilon\. Did you mean rms_norm_eps\?"),
        ({"text_config.vocab_size": 3}, r"LlamaConfig has no field text_config\.vocab_size"),
        ({"hidden_size": "wide"}, r"model\.config_override\.hidden_size: .*expected int, got str"),
    ],
)
def test_overrides_that_cannot_be_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_directory(tmp_path, "llama")

    with pytest.raises(ModelError, match=message):
        planned(ModelConfig(path=str(tmp_path), config_override=overrides))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "lama"}, r"transformers knows no model_type 'lama'\. Did you mean llama\?"),
        ({"hiden_size": 3}, r"model\.config: LlamaConfig has no field hiden_size\. Did you mean hidden_size\?"),
        ({"hidden_size": "wide"}, r"model\.config does not make a llama configuration: .*expected int, got str"),
        ({"num_attention_heads": 5}, r"not a multiple of the number of attention heads"),
        ({"hidden_act": "nonsense"}, r"transformers cannot build a llama model from its configuration: .*nonsense"),
        ({"model_type": "clip_vision_model"}, r"(no language model for|has no field)"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        planned(from_values(**values))


def test_misspelt_fields_of_sub_configurations_are_found() -> None:
    values = {"model_type": "gemma3", "text_config": {"hiden_size": 32}}

    with pytest.raises(ModelError, match=r"model\.config\.text_config: Gemma3TextConfig has no field hiden_size"):
        planned(ModelConfig(config=values, tokenizer="builtin:characters"))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ('{"model_type": "lama"}', "cannot read")])
def test_a_damaged_configuration_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_directory(tmp_path, "llama")
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError, match=rf"config\.json.*{message}|{message}.*config\.json"):
        planned(ModelConfig(path=str(tmp_path)))


def test_a_directory_without_a_configuration_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(ModelError, match=r"has no config\.json, so it is no model directory\. It holds notes\.txt"):
        planned(ModelConfig(path=str(tmp_path)))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"has no tokenizer that transformers can load.*Set model\.tokenizer"):
        planned(ModelConfig(path=str(tmp_path)))


ATTENTION = [
    ("llama", "auto", PACKED, ""),
    ("llama", "packed", PACKED, ""),
    ("llama", "sdpa", "sdpa", ""),
    ("llama", "eager", "eager", ""),
    ("lfm2", "auto", "sdpa", "one document per row, since its conv layers carry state across documents"),
    ("mamba", "auto", "eager", "one document per row, since its linear_attention layers carry state"),
    ("falcon", "auto", "sdpa", "one document per row, since its attention does not go through"),
    ("falcon", "sdpa", "sdpa", ""),
]


@pytest.mark.parametrize(("kind", "wanted", "expected", "note"), ATTENTION)
def test_attention_is_the_one_asked_for(tmp_path: Path, kind: str, wanted: str, expected: str, note: str) -> None:
    write_directory(tmp_path, kind)

    origin = planned(ModelConfig(path=str(tmp_path), attention=wanted))  # type: ignore[arg-type]

    assert origin.model.config._attn_implementation == expected
    assert origin.packed is (expected == PACKED)
    assert note in " ".join(origin.notes)
    assert bool(note) is bool(origin.notes)


@pytest.mark.parametrize(
    ("kind", "wanted", "message"),
    [
        ("lfm2", "packed", r"packed is not exact for lfm2: its conv layers carry state across documents"),
        ("mamba", "sdpa", r"mamba has no sdpa attention"),
        ("gemma2", "sdpa", r"gemma2 has no sdpa attention that is exact\. Use auto or eager"),
        ("falcon", "eager", r"eager cannot be set, falcon chooses by itself\. Use auto"),
    ],
)
def test_attention_that_cannot_be_is_refused(tmp_path: Path, kind: str, wanted: str, message: str) -> None:
    write_directory(tmp_path, kind)

    with pytest.raises(ModelError, match=message):
        planned(ModelConfig(path=str(tmp_path), attention=wanted))  # type: ignore[arg-type]


def test_a_mixture_of_experts_runs_in_float64(tmp_path: Path) -> None:
    write_directory(tmp_path, "mixtral")
    policy, _ = filled(tmp_path, dtype="float64", attention="sdpa")
    policy.double()

    logprobs = policy.upstream_values(torch.arange(2, 9))

    assert logprobs.dtype == torch.float64


def test_a_model_in_memory_is_copied_and_left_as_it_is() -> None:
    from holdfast.models.heads.policy import PolicyModel
    from holdfast.parallel.shards import materialise

    live = strong_model("mixtral", attention_dropout=0.25)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    config_before = json.dumps(live.config.to_dict(), default=str)
    origin = planned(from_values(), live=live, tokenizer=character_tokenizer())
    policy = PolicyModel(origin.model, origin.family, origin.family.head_spec(float32_product=False, chunk_tokens=None))
    materialise(policy, origin.source, origin.buffers, torch.device("cpu"))

    with torch.no_grad():
        for name, value in policy.language_model.state_dict().items():
            assert torch.equal(value, before[name])
            value.zero_()

    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    assert json.dumps(live.config.to_dict(), default=str) == config_before


def test_a_module_that_is_no_model_of_transformers_is_refused_by_its_class() -> None:
    with pytest.raises(ModelError, match=r"given in Python is a torch\.nn\.modules\.linear\.Linear, and none of trans"):
        planned(from_values(), live=torch.nn.Linear(2, 2), tokenizer=character_tokenizer())
