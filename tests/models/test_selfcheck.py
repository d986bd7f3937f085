"""The check before step 1 passes for every architecture we know and stops what would train on wrong numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.attention import PACKED, packed_attention, register
from holdfast.models.family import family_of
from holdfast.models.policy import PolicyModel
from holdfast.models.scores import HeadSpec
from holdfast.models.selfcheck import check_forward
from tests.models.architectures import strong_model, twin
from tests.models.cases import checked
from tests.models.directories import BLIND, KINDS, MULTIMODAL, model_of, write_directory


def policy_of(model: Any, spec: HeadSpec | None = None) -> PolicyModel:
    register()
    family = family_of(model)
    padded = bool(family.why_not_packed)
    if not padded:
        model.set_attn_implementation(PACKED)
    right = family.head_spec(float32_product=False, chunk_tokens=None)
    return PolicyModel(model, family, spec or right, padded=padded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_passes_in_the_form_that_auto_chooses(kind: str) -> None:
    policy = policy_of(model_of(kind))

    result, note = check_forward(policy, may_fall_back=False, compute_dtype=torch.float32)

    assert note == ""
    assert result.difference < 2e-5
    assert result.leak < 1e-5
    assert policy.training
    assert (
        policy.language_model.config._attn_implementation == (PACKED if not policy.padded else "sdpa")
        or kind == "mamba"
    )


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("granite", HeadSpec()),
        ("cohere2", HeadSpec(scale=1 / 0.3)),
        ("gemma2", HeadSpec()),
        ("gemma2", HeadSpec(softcap=5.0)),
        ("llama", HeadSpec(scale=0.97)),
    ],
    ids=str,
)
@pytest.mark.parametrize("may_fall_back", [True, False])
def test_logits_by_another_rule_stop_the_run(kind: str, wrong: HeadSpec, may_fall_back: bool) -> None:
    policy = policy_of(strong_model(kind), wrong)

    with pytest.raises(ModelError, match=rf"Log-probabilities of {kind} differ from transformers' own by \d"):
        check_forward(policy, may_fall_back=may_fall_back, compute_dtype=torch.float32)


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
        check_forward(policy, may_fall_back=False, compute_dtype=torch.float32)
    result, note = check_forward(policy, may_fall_back=True, compute_dtype=torch.float32)

    assert policy.padded
    assert "packed documents see each other (by " in note
    assert result.leak == 0.0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MULTIMODAL | BLIND])
def test_bfloat16_passes_with_its_own_tolerance(kind: str) -> None:
    policy = policy_of(twin(strong_model(kind, scale=2.0), torch.bfloat16))

    check_forward(policy, may_fall_back=False, compute_dtype=torch.bfloat16)


def test_bfloat16_rounding_does_not_hide_a_missing_cap() -> None:
    policy = policy_of(twin(strong_model("gemma2"), torch.bfloat16), HeadSpec())

    with pytest.raises(ModelError, match=r"gemma2 differ from transformers' own"):
        check_forward(policy, may_fall_back=False, compute_dtype=torch.bfloat16)


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
