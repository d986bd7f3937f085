"""The comparison before step 1, with kernels that run by Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.data.batches.packing import Share, pack
from holdfast.models.check.forward import documents
from holdfast.models.check.head_forms import compare_forms
from holdfast.models.chunks.kernel_form import why_no_triton
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import family_of
from holdfast.types import Batch
from tests.tiny import tiny_model

if why_no_triton() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def policy_and_batch(kind: str, dtype: torch.dtype) -> tuple[PolicyModel, Batch]:
    model = tiny_model(kind).to(dtype)
    spec = replace(family_of(model).head_spec(float32_product=False, chunk_tokens=None), kernel_tokens=16)
    policy = PolicyModel(model, family_of(model), spec)
    first, _, second = documents(policy, None)
    return policy, pack([first, second], [Share(1.0, 1.0)] * 2, padded=False)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["32", "16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_kernels_agree_with_torchs_operations_on_a_model(kind: str, dtype: torch.dtype, limit: float) -> None:
    policy, batch = policy_and_batch(kind, dtype)

    reason, difference, _ = compare_forms(policy, batch)

    assert reason == ""
    assert difference < limit


def test_a_kernel_that_computes_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.models.chunks import kernels

    right = kernels.write_slopes

    def wrong(products: Any, bias: Any, targets: Any, numbers: Any, *scales: Any, entropy: bool) -> None:
        numbers[3] *= 1.05  # what the loss's derivative by a log-probability takes from every other token
        right(products, bias, targets, numbers, *scales, entropy=entropy)

    monkeypatch.setattr(kernels, "write_slopes", wrong)
    policy, batch = policy_and_batch("llama", torch.float32)

    reason, *_ = compare_forms(policy, batch)

    assert "gradients of the" in reason
    assert "differ from those of torch's operations by" in reason


def test_a_frozen_head_has_no_gradient_to_compare() -> None:
    policy, batch = policy_and_batch("llama", torch.float32)
    policy.requires_grad_(requires_grad=False)

    assert compare_forms(policy, batch)[0] == ""


def test_a_kernel_that_fails_is_named_and_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.models.chunks import kernels

    def without_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(kernels, "read_rows", without_compiler)
    policy, batch = policy_and_batch("llama", torch.float32)

    reason, *_ = compare_forms(policy, batch)

    assert reason == (
        "they failed (RuntimeError: Failed to find C compiler. Please specify via CC environment variable.)"
    )
