"""The check before step 1 passes for every architecture we know and stops what would train on wrong numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from holdfast.errors import ModelError
from holdfast.models.check.boundaries import boundaries_of, lengths_to_see
from holdfast.models.check.forward import TOLERANCE, check_forward
from holdfast.models.check.shrink import CannotShrink, shrink
from holdfast.models.check.witness import as_files_say, follow_implementation
from holdfast.models.files.configuration import make_trainable
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import PACKED, packed_attention, register_attention
from holdfast.models.layers.family import HeadSpec, family_of
from holdfast.models.layers.llama4_output import give_image_outputs
from tests.models.architectures import BY_LENGTH, OTHERS, RECURRENT, SETTINGS, settings_of, strong_model, twin
from tests.models.cases import checked
from tests.models.directories import BLIND, KINDS, MULTIMODAL, model_of, write_directory
from tests.models.sides import sides_of
from tests.tiny import COMMON, tiny_model

SHARING = BLIND["gemma4"]["text_config"] | {
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
    "sliding_window": 512,
}
DENSE_FIRST = SETTINGS["deepseek_v3"] | {"num_hidden_layers": 5, "first_k_dense_replace": 2}


def policy_of(model: Any, spec: HeadSpec | None = None) -> PolicyModel:
    register_attention()
    give_image_outputs()
    family = family_of(model)
    padded = bool(family.why_not_packed)
    if not padded:
        model.set_attn_implementation(PACKED)
    right = family.head_spec(float32_product=False, chunk_tokens=None)
    return PolicyModel(model, family, spec or right, padded=padded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_passes_in_the_form_that_auto_chooses(kind: str) -> None:
    policy = policy_of(model_of(kind))

    result, note = check_forward(sides_of(policy), may_fall_back=False)

    assert note == ""
    assert result.difference < 2e-5
    assert result.leak < 1e-5
    assert policy.training
    assert (
        policy.language_model.config._attn_implementation == (PACKED if not policy.padded else "sdpa")
        or kind == "mamba"
    )


@pytest.mark.parametrize(
    ("kind", "wrong", "measured"),
    [
        ("granite", HeadSpec(), r"times 0\.3333; read, unchanged"),
        ("cohere2", HeadSpec(scale=1 / 0.3), r"times 0\.3; read, times 3\.333"),
        ("gemma2", HeadSpec(), r"with a soft cap of 4; read, unchanged"),
        (
            "gemma2",
            HeadSpec(softcap=4.01),
            r"with a soft cap of 4; read, with a soft cap of 4\.01",
        ),
        ("llama", HeadSpec(scale=0.97), r"unchanged; read, times 0\.97"),
    ],
    ids=str,
)
@pytest.mark.parametrize("may_fall_back", [True, False])
def test_a_head_by_another_rule_stops_the_run_and_is_measured(
    kind: str, wrong: HeadSpec, measured: str, may_fall_back: bool
) -> None:
    policy = policy_of(strong_model(kind), wrong)

    with pytest.raises(ModelError, match=rf"The logits of {kind} follow .* returned {measured}\."):
        check_forward(sides_of(policy), may_fall_back=may_fall_back)


def test_a_soft_cap_is_seen_where_logits_are_small() -> None:
    """Random weights give logits of a tenth, of which a cap of 30 takes a ten-millionth."""
    policy = policy_of(tiny_model("gemma2", final_logit_softcapping=30.0), HeadSpec())

    with pytest.raises(ModelError, match=r"returned with a soft cap of 30; read, unchanged"):
        check_forward(sides_of(policy), may_fall_back=False)


def test_the_head_of_recurrent_gemma_passes_from_a_random_start() -> None:
    policy = policy_of(tiny_model("recurrent_gemma", lru_width=32, attention_window_size=6, head_dim=8))

    check_forward(sides_of(policy), may_fall_back=False)

    assert policy.head_spec.softcap == 30.0


def logits_in_evaluation(config: Any, weights: dict[str, Tensor]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(2, 26)[None]).logits
    return logits


@pytest.mark.parametrize("kind", [*SETTINGS, *BY_LENGTH, *RECURRENT, *OTHERS])
def test_the_configuration_of_a_run_evaluates_as_that_of_its_files(kind: str) -> None:
    model = tiny_model(kind, **settings_of(kind))
    config = copy.deepcopy(model.config)

    make_trainable(config, keep_dropout=False)

    weights = model.state_dict()
    assert torch.equal(logits_in_evaluation(config, weights), logits_in_evaluation(model.config, weights))


def test_documents_on_both_sides_of_a_boundary_lie_in_one_batch() -> None:
    """No short text shows angles that change beyond 60 tokens; as transformers decides, the longest text decides."""
    longrope = settings_of("phi3:longrope") | {"original_max_position_embeddings": 60, "sliding_window": None}
    model = tiny_model("phi3:longrope", **longrope)
    policy = policy_of(model)

    sound, _ = check_forward(sides_of(policy), may_fall_back=False)
    for name, module in model.named_modules():
        if "rotary" in name:
            vars(module).pop("forward", None)  # our angles

    assert sound.lengths == ((60,), (), 2)
    assert sound.beyond < 1e-5
    with pytest.raises(ModelError, match=r"Hidden states of phi3 differ .* up to and beyond 60 tokens .* short texts"):
        check_forward(sides_of(policy), may_fall_back=False)


def test_boundaries_are_windows_chunks_and_angles_and_a_long_one_is_named() -> None:
    model = tiny_model("mistral", sliding_window=20_000, max_position_embeddings=32_000)

    found = lengths_to_see(model, torch.device("cpu"))

    assert found.checked == ()
    assert found.too_long == (20_000,)
    assert boundaries_of(tiny_model("llama:dynamic", **settings_of("llama:dynamic")).config) == (20,)
    assert boundaries_of(tiny_model("qwen2", use_sliding_window=False, sliding_window=6).config) == ()
    assert boundaries_of(AutoConfig.for_model("gpt_neo", window_size=48)) == (48,)


def test_beyond_a_boundary_layers_of_every_kind_are_looked_at() -> None:
    with torch.device("meta"):
        small = model_of("gemma4", text_config=SHARING | {"hidden_size": 64})
        large = model_of("gemma4", text_config=SHARING | {"hidden_size": 64, "intermediate_size": 2**17})

    assert lengths_to_see(small, torch.device("cpu")) == ((512,), (), 12)  # with those that share keys
    assert lengths_to_see(large, torch.device("cpu")) == ((512,), (), 3)  # no time for them
    assert lengths_to_see(tiny_model("deepseek_v3", **DENSE_FIRST), torch.device("cpu")).layers == 3


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("mpt", "n_layers"),
        ("dbrx", "n_layers"),
        ("gpt_neo", "num_layers"),
        ("bart", "decoder_layers"),
    ],
)
def test_layers_are_counted_under_whatever_name(kind: str, field: str) -> None:
    model = tiny_model(kind, **settings_of(kind))

    result, _ = check_forward(sides_of(policy_of(model)), may_fall_back=True)

    assert model.config.to_dict()[field] == 2
    assert result.lengths.layers == 2
    assert result.difference < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 8.0, 40.0])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_limits_leave_room_for_deep_models_and_peaked_logits(kind: str, scale: float) -> None:
    """At most 2.3e-5 was measured in 33 such models of 32 and 48 layers, whose logits spread by 0.3 to 12."""
    result, _ = check_forward(
        sides_of(policy_of(strong_model(kind, scale=scale, num_hidden_layers=32))), may_fall_back=False
    )

    assert result.difference < TOLERANCE[torch.float32] / 20
    assert result.beyond < TOLERANCE[torch.float32] / 100
    assert result.leak == 0.0


class UncountedConfig(LlamaConfig):  # type: ignore[misc]  # transformers'
    """Layers are counted under a name that nobody knows."""

    model_type = "uncounted"
    attribute_map: ClassVar = {"num_hidden_layers": "how_many"}
    how_many: int = 2


def test_where_layers_cannot_be_counted_all_are_looked_at() -> None:
    config = UncountedConfig(**COMMON | {"how_many": 3, "attention_chunk_size": 6})
    model = LlamaForCausalLM(config).eval()

    result, _ = check_forward(sides_of(policy_of(model)), may_fall_back=False)

    assert "num_hidden_layers" not in config.to_dict()
    assert result.lengths == ((6,), (), 3)
    assert result.beyond < 1e-5
    with pytest.raises(CannotShrink, match="uncounted cannot be made small: its configuration does not count its"):
        shrink(config, LlamaForCausalLM)


def test_a_scale_of_hidden_states_before_the_head_is_seen() -> None:
    model = strong_model("minicpm3")

    result, _ = check_forward(sides_of(policy_of(model)), may_fall_back=False)

    assert family_of(model).logit_scale == 0.5
    assert result.head_seen
    assert result.difference < 2e-5
    for wrong, measured in ((HeadSpec(), "times 0.5; read, unchanged"), (HeadSpec(scale=0.49), "read, times 0.49")):
        with pytest.raises(ModelError, match=measured):
            check_forward(sides_of(policy_of(model, wrong)), may_fall_back=False)


def test_a_scale_that_the_code_of_a_model_never_reads_is_none() -> None:
    for scale in (0.5, "inv_sqrt_d_model"):
        model = tiny_model("mpt", n_layers=2, logit_scale=scale)

        assert family_of(model).logit_scale == 1.0
        check_forward(sides_of(policy_of(model)), may_fall_back=False)


class TwiceRead(LlamaForCausalLM):  # type: ignore[misc]  # transformers'
    """A Llama that calls its output layer twice, so that what it makes of it cannot be told apart."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what Llama does."""
        super().forward(*args, **options)
        return super().forward(*args, **options)


def test_a_head_that_cannot_be_seen_is_left_to_the_log_probabilities() -> None:
    model = TwiceRead(strong_model("llama").config).eval()

    result, _ = check_forward(sides_of(policy_of(model)), may_fall_back=False)

    assert not result.head_seen
    with pytest.raises(ModelError, match="Log-probabilities of llama differ"):
        check_forward(sides_of(policy_of(model, HeadSpec(scale=0.5))), may_fall_back=False)


class LouderHead(LlamaForCausalLM):  # type: ignore[misc]  # transformers'
    """A Llama whose logits are smaller and capped, by fields that nobody knows."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what Llama does, by another rule of the head."""
        output = super().forward(*args, **options)
        output.logits = 7.0 * torch.tanh(0.9 * output.logits / 7.0)
        return output


def test_a_head_rule_of_its_own_under_a_new_name_is_measured() -> None:
    model = LouderHead(tiny_model("llama").config).eval()

    with pytest.raises(ModelError, match=r"returned times 0\.9, with a soft cap of 7; read"):
        check_forward(sides_of(policy_of(model)), may_fall_back=False)


def test_a_rotary_rule_of_its_own_under_a_new_name_is_caught() -> None:
    """Half the angle at every layer but in transformers' own forward pass of the files."""
    policy = policy_of(tiny_model("llama"))
    rotary: Any = policy.language_model.model.rotary_emb
    plain = type(rotary).forward

    def halved(x: Tensor, position_ids: Tensor) -> Any:
        return plain(rotary, x, position_ids / 2)

    rotary.forward = halved

    with pytest.raises(ModelError, match=r"Log-probabilities of llama differ from transformers' own by \d"):
        check_forward(sides_of(policy), may_fall_back=False)


def test_a_field_that_was_changed_behind_the_back_of_the_files_is_caught() -> None:
    model = tiny_model("phimoe", **settings_of("phimoe"))
    files = copy.deepcopy(model.config)
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = 0.0

    with pytest.raises(ModelError, match=r"Log-probabilities of phimoe differ from transformers' own by \d"):
        check_forward(sides_of(policy_of(model), files=files), may_fall_back=False)


def test_a_comparison_leaves_nothing_in_modules_that_their_forward_passes_keep() -> None:
    model: Any = tiny_model("llama")
    policy, layer = policy_of(model), model.model.layers[1].mlp
    plain = type(layer).forward

    def keeping(hidden: Tensor) -> Any:
        layer.longest = max(getattr(layer, "longest", 0), hidden.shape[1])
        layer.register_buffer("last", hidden.detach(), persistent=False)
        return plain(layer, hidden)

    sides = sides_of(policy)
    follow_implementation(sides.witness, model)
    before = [{*vars(module), *module._buffers} for module in model.modules()]
    with as_files_say(model, sides.witness, sides.device):
        layer.forward = keeping
        model.config.hidden_act = "relu"
        model(input_ids=torch.arange(2, 9)[None])
        del layer.forward

    assert [{*vars(module), *module._buffers} for module in model.modules()] == before
    assert model.config.hidden_act == "silu"


def leaking_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend to what lies before a token in the row, whatever document it belongs to."""
    whole = type(options["documents"]).of((query.shape[2],), query.device)
    return packed_attention(module, query, key, value, mask, **(options | {"documents": whole}))


def faint_leak(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Let one ten-thousandth of a leak through."""
    clean, _ = packed_attention(module, query, key, value, mask, **options)
    return clean + 1e-4 * (leaking_attention(module, query, key, value, mask, **options)[0] - clean), None


@pytest.mark.parametrize("attention", [leaking_attention, faint_leak])
def test_attention_that_sees_across_documents_is_caught(attention: Any) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    policy = policy_of(strong_model("llama"))
    ALL_ATTENTION_FUNCTIONS.register(attention.__name__, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(attention.__name__, lambda *_, **__: None)
    policy.language_model.set_attn_implementation(attention.__name__)  # type: ignore[operator]

    with pytest.raises(ModelError, match=r"between documents: \d"):
        check_forward(sides_of(policy), may_fall_back=False)
    result, note = check_forward(sides_of(policy), may_fall_back=True)

    assert policy.padded
    assert "packed documents see each other (by " in note
    assert result.leak == 0.0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MULTIMODAL | BLIND])
def test_bfloat16_passes_with_its_own_tolerance(kind: str) -> None:
    policy = policy_of(twin(strong_model(kind, scale=2.0), torch.bfloat16))

    check_forward(sides_of(policy, torch.bfloat16), may_fall_back=False)


def test_bfloat16_rounding_does_not_hide_a_missing_cap() -> None:
    policy = policy_of(twin(strong_model("gemma2"), torch.bfloat16), HeadSpec())

    with pytest.raises(ModelError, match=r"The logits of gemma2 follow .* with a soft cap of 4"):
        check_forward(sides_of(policy, torch.bfloat16), may_fall_back=False)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "stablelm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_models_are_checked_and_may_fall_back(pools: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    saved = write_directory(tmp_path, kind)
    expected = []
    for tokens in (torch.arange(2, 22), torch.arange(30, 43)):
        logprobs = saved(input_ids=tokens[None]).logits[0].detach().log_softmax(-1)[:-1]
        expected.append(logprobs.gather(1, tokens[1:, None]).squeeze(1))

    for rank in pools(2).run(checked, {"path": str(tmp_path)}, {"compute_dtype": dtype}):
        assert rank["padded"] is (kind == "stablelm")
        tolerance = 1e-5 if dtype == "float32" else 0.25
        np.testing.assert_allclose(rank["logprobs"], torch.cat(expected).double(), rtol=0, atol=tolerance)
