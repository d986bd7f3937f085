"""Where a model keeps what makes hidden states, and what its layers say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import head_sizes, pads_branches
from holdfast.models.layers.family import backbone_of, reader_of
from holdfast.models.names import canonical_name, named_parameters
from tests.models.architectures import OTHERS, SETTINGS
from tests.models.directories import BLIND, KINDS, model_of
from tests.tiny import tiny_model

SCALED_BEFORE = {"minicpm3": 0.5}
"""What transformers multiplies hidden states by between the two."""


@pytest.mark.parametrize("kind", [*KINDS, "llama4_text", "gpt2"])
def test_the_backbone_ends_in_the_hidden_states_that_the_output_layer_reads(kind: str) -> None:
    model = model_of(kind)
    read: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    tokens = torch.arange(10, 30)[None]

    with torch.no_grad():
        hidden = backbone_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        reader_of(model)(input_ids=tokens, use_cache=False)

    torch.testing.assert_close(hidden * SCALED_BEFORE.get(kind, 1.0), read[0])


@pytest.mark.parametrize("kind", BLIND)
def test_a_policy_names_parameters_and_buffers_as_its_model_does(kind: str) -> None:
    model = model_of(kind)
    policy = PolicyModel(model, None, None)  # type: ignore[arg-type]  # names alone

    assert list(named_parameters(policy)) == [name for name, _ in model.named_parameters()]
    assert [canonical_name(name) for name, _ in policy.named_buffers()] == [name for name, _ in model.named_buffers()]


@pytest.mark.parametrize("kind", [*SETTINGS, *OTHERS, *BLIND])
def test_the_sizes_of_heads_are_those_that_attention_is_called_with(kind: str) -> None:
    if kind in {"falcon", "mpt", "gpt_neo"}:
        pytest.skip("its attention does not go through transformers' interface")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, seen = model_of(kind), set()

    def noting(_: nn.Module, query: Tensor, __: Tensor, value: Tensor, *___: Any, **____: Any) -> tuple[Tensor, None]:
        seen.add((query.shape[-1], value.shape[-1]))
        return query.new_zeros(1, *query.shape[2:0:-1], value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS.register("noting", noting)
    model.set_attn_implementation("noting")

    reader_of(model)(input_ids=torch.arange(10, 16)[None], use_cache=False)

    assert head_sizes(model) == seen


@pytest.mark.parametrize(
    ("kind", "options", "pads"),
    [
        ("llama", {}, False),
        ("gemma2", {"attn_logit_softcapping": 3.0}, True),
        ("deepseek_v3", SETTINGS["deepseek_v3"] | {"v_head_dim": 16}, False),
        ("deepseek_v3", SETTINGS["deepseek_v3"], True),  # heads of 16 and 12; the configuration's head_dim is 8
    ],
)
def test_on_cuda_branches_are_padded_where_a_layer_cannot_take_the_kernel(
    kind: str, options: dict[str, Any], pads: bool
) -> None:
    assert pads_branches(tiny_model(kind, **options), "cuda", torch.bfloat16) is pads


@pytest.mark.parametrize(("global_size", "pads"), [(16, False), (512, True)])
def test_one_layer_with_large_heads_pads_the_branches_of_gemma_4(global_size: int, pads: bool) -> None:
    text = BLIND["gemma4"]["text_config"] | {"global_head_dim": global_size}

    assert pads_branches(model_of("gemma4", text_config=text), "cuda", torch.bfloat16) is pads
