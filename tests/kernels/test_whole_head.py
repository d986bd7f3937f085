"""The whole head by the kernels: loss and gradients against float64's autograd, and against torch's operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from holdfast.models.chunks.kernel_form import why_no_triton
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.layers.family import HeadSpec
from holdfast.models.scores import separable_loss
from holdfast.models.support import Support
from holdfast.types import Scores
from tests.models.test_scores import FORMS, fair_accuracy, leaves, plain

if why_no_triton() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOKENS, WIDTH, VOCABULARY = 21, 16, 1003

OPTIONS = [
    pytest.param(HeadSpec(), 1.0, False, False, id="plain"),
    pytest.param(HeadSpec(), 0.7, True, False, id="bias, temperature"),
    pytest.param(HeadSpec(scale=0.5), 1.0, False, True, id="scale, entropy"),
    pytest.param(HeadSpec(softcap=3.0), 1.0, True, False, id="soft cap, bias"),
    pytest.param(HeadSpec(scale=1.4, softcap=2.0), 0.8, True, True, id="all at once"),
]


def draw(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, HeadWeights, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.5).to(dtype).requires_grad_()
    shift = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCABULARY - 1
    return hidden, HeadWeights(weight, shift if bias else None), targets


def terms(logprobs: Tensor, entropy: Tensor | None, start: int, end: int) -> Tensor:
    weights = torch.linspace(0.5, 1.5, TOKENS, dtype=logprobs.dtype)[start:end]
    loss = weights * (logprobs.exp() - 2 * logprobs)
    return loss if entropy is None else loss - 0.3 * weights * entropy


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("dtype", "limit", "of_values"), [(torch.float32, 1e-5, 2e-6), (torch.bfloat16, 8e-3, 8e-3)], ids=["32", "16"]
)
@pytest.mark.parametrize(("spec", "temperature", "bias", "entropy"), OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_float64_and_of_torchs_operations(  # noqa: PLR0917
    form: Callable[..., tuple[Tensor, Scores]],
    spec: HeadSpec,
    temperature: float,
    bias: bool,
    entropy: bool,
    dtype: torch.dtype,
    limit: float,
    of_values: float,
) -> None:
    hidden, head, targets = draw(dtype, bias=bias)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves(hidden, head)]
    logprobs, entropies = plain(wide[0], HeadWeights(wide[1], wide[2] if bias else None), targets, spec, temperature)
    exact = terms(logprobs, entropies if entropy else None, 0, TOKENS).sum()
    wanted = torch.autograd.grad(exact * 3.0, wide)
    options: dict[str, Any] = {"temperature": temperature, "entropy": entropy}

    by_torch, expected = form(hidden, head, targets, terms, replace(spec, chunk_tokens=8), **options)
    gradients = torch.autograd.grad(by_torch * 3.0, leaves(hidden, head))
    loss, scores = form(hidden, head, targets, terms, replace(spec, kernel_tokens=8), **options)
    found = torch.autograd.grad(loss * 3.0, leaves(hidden, head))

    assert error(loss, exact) < of_values  # of bfloat16, the logits themselves are rounded
    assert_close(scores.logprobs, expected.logprobs, rtol=2e-6, atol=2e-6)
    assert_close(scores.accuracy, expected.accuracy)
    if entropy:
        assert scores.entropy is not None
        assert expected.entropy is not None
        assert_close(scores.entropy, expected.entropy, rtol=2e-6, atol=2e-6)
    for mine, theirs, right in zip(found, gradients, wanted, strict=True):
        assert mine.dtype == dtype
        assert error(mine, theirs) < limit
        assert error(mine, right) < limit


@pytest.mark.parametrize("frozen", ["head", "hidden"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_frozen_gets_no_gradient(form: Callable[..., Any], frozen: str) -> None:
    hidden, head, targets = draw(torch.float32, bias=True)
    whole, _ = form(hidden, head, targets, terms, HeadSpec(kernel_tokens=8))
    expected = torch.autograd.grad(whole, leaves(hidden, head))
    if frozen == "head":
        head = HeadWeights(*(None if tensor is None else tensor.detach() for tensor in head))  # type: ignore[arg-type]
    else:
        hidden = hidden.detach()

    form(hidden, head, targets, terms, HeadSpec(kernel_tokens=8))[0].backward()

    for name, tensor, gradient in zip(("hidden", "head", "head"), leaves(hidden, head), expected, strict=True):
        if name == frozen:
            assert tensor.grad is None
        else:
            assert_close(tensor.grad, gradient, rtol=0, atol=0)


def test_a_float32_head_multiplies_bfloat16_states_without_rounding_the_logits() -> None:
    hidden, head, targets = draw(torch.bfloat16, bias=True)
    wide = [tensor.detach().double() for tensor in leaves(hidden, head)]
    expected, _ = plain(wide[0], HeadWeights(wide[1], wide[2]), targets, HeadSpec(), 1.0)

    _, scores = separable_loss(hidden, head, targets, terms, HeadSpec(float32_product=True, kernel_tokens=8))

    assert_close(scores.logprobs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("support", [Support(top_k=5), Support(top_p=0.6), Support(top_k=9, top_p=0.8, min_p=0.1)])
@pytest.mark.parametrize("form", FORMS)
def test_a_support_leaves_out_the_same_tokens_as_in_torchs_operations(
    form: Callable[..., Any], support: Support, dtype: torch.dtype
) -> None:
    hidden, head, targets = draw(dtype, bias=True)
    spec = HeadSpec(scale=1.2, softcap=4.0, support=support)

    by_torch, expected = form(
        hidden, head, targets, terms, replace(spec, chunk_tokens=8), temperature=0.7, entropy=True
    )
    gradients = torch.autograd.grad(by_torch, leaves(hidden, head))
    loss, scores = form(hidden, head, targets, terms, replace(spec, kernel_tokens=8), temperature=0.7, entropy=True)
    found = torch.autograd.grad(loss, leaves(hidden, head))

    assert_close(scores.logprobs, expected.logprobs, rtol=3e-6, atol=3e-6)
    assert_close(scores.entropy, expected.entropy, rtol=3e-6, atol=3e-6)
    for mine, theirs in zip(found, gradients, strict=True):
        assert error(mine, theirs) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_greedy_matches_count_a_share_among_the_ties_that_bfloat16_makes() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(256, 6, generator=generator), torch.randn(5000, 6, generator=generator)
    hidden, weight = (0.1 * hidden).bfloat16(), weight.bfloat16()
    logits = (hidden @ weight.t()).float()
    targets = logits.argmax(-1)
    expected = fair_accuracy(logits.numpy(), targets.numpy())

    _, scores = separable_loss(
        hidden, HeadWeights(weight, None), targets, lambda p, *_: -p, HeadSpec(kernel_tokens=256)
    )

    assert (expected < 1).sum() >= 4
    np.testing.assert_allclose(scores.accuracy.numpy(), expected, rtol=1e-6)


def test_a_row_without_numbers_predicts_nothing_right_and_says_so() -> None:
    hidden = torch.tensor([[float("nan")], [1.0]])
    targets = torch.tensor([0, 0])

    _, scores = separable_loss(
        hidden, HeadWeights(torch.ones(4, 1), None), targets, lambda p, *_: -p, HeadSpec(kernel_tokens=2)
    )

    assert scores.accuracy.tolist() == [0.0, 0.25]
    assert scores.logprobs.isnan().tolist() == [True, False]


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_rank_without_tokens_gives_gradients_of_zeros(form: Callable[..., Any]) -> None:
    hidden, head, targets = draw(torch.float32, bias=True)
    hidden = hidden.detach()[:0].requires_grad_()

    loss, _ = form(hidden, head, targets[:0], lambda p, *_: -p, HeadSpec(kernel_tokens=8))
    loss.backward()

    for leaf in leaves(hidden, head):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_smoothed_labels_and_float64_take_torchs_operations() -> None:
    hidden, head, targets = draw(torch.float32, bias=False)
    exact = [tensor.detach().double() for tensor in leaves(hidden, head)]

    smoothed = [
        separable_loss(hidden, head, targets, terms, spec, label_smoothing=0.2)[0]
        for spec in (HeadSpec(chunk_tokens=8), HeadSpec(chunk_tokens=8, kernel_tokens=8))
    ]
    _, scores = separable_loss(exact[0], HeadWeights(exact[1], None), targets, terms, HeadSpec(kernel_tokens=8))

    assert torch.equal(*smoothed)
    expected = plain(exact[0], HeadWeights(exact[1], None), targets, HeadSpec(), 1.0)[0]
    assert_close(scores.logprobs, expected, rtol=1e-12, atol=1e-12)
