"""Log-probabilities, entropies and gradients of the head against autograd of full logits, in both forms."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from holdfast.models.chunks.logits import HeadWeights, add_product
from holdfast.models.layers.family import HeadSpec
from holdfast.models.scores import TokenTerms, score, separable_loss
from holdfast.models.support import Support
from holdfast.types import Scores

TOKENS, WIDTH, VOCABULARY = 13, 6, 31
EXACT = {"rtol": 1e-10, "atol": 1e-10}

SPECS = [
    pytest.param(HeadSpec(chunk_tokens=1), 1.0, False, id="chunks of 1"),
    pytest.param(HeadSpec(chunk_tokens=7), 1.0, False, id="chunks of 7"),
    pytest.param(HeadSpec(chunk_tokens=13), 1.0, False, id="one chunk"),
    pytest.param(HeadSpec(), 1.0, True, id="bias"),
    pytest.param(HeadSpec(chunk_tokens=7), 0.6, False, id="temperature"),
    pytest.param(HeadSpec(scale=0.3, chunk_tokens=7), 1.3, True, id="scale, temperature and bias"),
    pytest.param(HeadSpec(softcap=1.7, chunk_tokens=7), 1.0, False, id="soft cap"),
    pytest.param(HeadSpec(scale=1.4, softcap=1.7, chunk_tokens=7), 0.8, True, id="all at once"),
]


def draw(*, bias: bool, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, HeadWeights, Tensor]:
    """Return hidden states, head and targets; hidden states and head want gradients."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    shift = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return hidden, HeadWeights(weight, shift if bias else None), targets


def plain(
    hidden: Tensor, head: HeadWeights, targets: Tensor, spec: HeadSpec, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies from the logits of all tokens, differentiably."""
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def terms(logprobs: Tensor, entropy: Tensor | None, start: int, end: int) -> Tensor:
    """A loss with curvature, whose weight depends on the place of a token and which rewards entropy."""
    weights = torch.linspace(0.5, 1.5, TOKENS, dtype=logprobs.dtype)[start:end]
    loss = weights * (logprobs.exp() - 2 * logprobs)
    return loss if entropy is None else loss - 0.7 * weights * entropy.square()


def by_recomputing(
    hidden: Tensor, head: HeadWeights, targets: Tensor, terms: TokenTerms, spec: HeadSpec, **options: Any
) -> tuple[Tensor, Scores]:
    scores = score(hidden, head, targets, spec, **options)
    return terms(scores.logprobs, scores.entropy, 0, targets.shape[0]).sum(), scores


FORMS = [pytest.param(by_recomputing, id="recomputed"), pytest.param(separable_loss, id="one pass")]


def leaves(hidden: Tensor, head: HeadWeights) -> list[Tensor]:
    return [tensor for tensor in (hidden, *head) if tensor is not None]


@pytest.mark.parametrize("entropy", [False, True], ids=["no entropy", "entropy in the loss"])
@pytest.mark.parametrize(("spec", "temperature", "bias"), SPECS)
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_give_the_values_and_gradients_of_full_logits(
    form: Callable[..., Any], spec: HeadSpec, temperature: float, bias: bool, entropy: bool
) -> None:
    hidden, head, targets = draw(bias=bias)
    logprobs, entropies = plain(hidden, head, targets, spec, temperature)
    expected = terms(logprobs, entropies if entropy else None, 0, TOKENS).sum()
    gradients = torch.autograd.grad(expected * 3.0, leaves(hidden, head))

    loss, scores = form(hidden, head, targets, terms, spec, temperature=temperature, entropy=entropy)
    found = torch.autograd.grad(loss * 3.0, leaves(hidden, head))

    assert_close(loss, expected, **EXACT)
    assert_close(scores.logprobs, logprobs, **EXACT)
    assert scores.entropy is None if not entropy else torch.allclose(scores.entropy, entropies, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(found, gradients, strict=True):
        assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("watched", [False, True], ids=["no entropy", "entropy in the loss"])
@pytest.mark.parametrize(("spec", "temperature", "bias"), SPECS)
def test_smoothed_labels_have_the_values_and_gradients_of_full_logits(
    spec: HeadSpec, temperature: float, bias: bool, watched: bool
) -> None:
    hidden, head, targets = draw(bias=bias)
    every = torch.arange(VOCABULARY).expand(TOKENS, -1)
    by_token = [plain(hidden, head, every[:, token], spec, temperature)[0] for token in range(VOCABULARY)]
    logprobs, entropies = plain(hidden, head, targets, spec, temperature)
    smoothed = 0.7 * logprobs + 0.3 * torch.stack(by_token).mean(0)
    expected = terms(smoothed, entropies if watched else None, 0, TOKENS).sum()
    gradients = torch.autograd.grad(expected * 3.0, leaves(hidden, head))

    options = {"temperature": temperature, "entropy": watched, "label_smoothing": 0.3}
    loss, scores = separable_loss(hidden, head, targets, terms, spec, **options)
    found = torch.autograd.grad(loss * 3.0, leaves(hidden, head))

    assert_close(loss, expected, **EXACT)
    assert_close(scores.logprobs, logprobs, **EXACT)
    for mine, theirs in zip(found, gradients, strict=True):
        assert_close(mine, theirs, **EXACT)


def test_entropy_can_be_watched_without_entering_the_loss() -> None:
    hidden, head, targets = draw(bias=False)
    _, entropies = plain(hidden, head, targets, HeadSpec(), 1.0)

    loss, scores = separable_loss(hidden, head, targets, lambda logprobs, *_: -logprobs, HeadSpec(), entropy=True)
    found = torch.autograd.grad(loss, leaves(hidden, head))

    plain_loss = -plain(hidden, head, targets, HeadSpec(), 1.0)[0].sum()
    for mine, theirs in zip(found, torch.autograd.grad(plain_loss, leaves(hidden, head)), strict=True):
        assert_close(mine, theirs, **EXACT)
    assert_close(scores.entropy, entropies.detach(), **EXACT)


@pytest.mark.parametrize("frozen", ["head", "hidden"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_unchanged(form: Callable[..., Any], frozen: str) -> None:
    hidden, head, targets = draw(bias=True)
    expected = dict(zip(("hidden", "weight", "bias"), gradients_of(form, hidden, head, targets), strict=True))
    if frozen == "head":
        head = HeadWeights(head.weight.detach(), head.bias.detach() if head.bias is not None else None)
    else:
        hidden = hidden.detach()

    loss, scores = form(hidden, head, targets, terms, HeadSpec(chunk_tokens=5), temperature=1.0, entropy=True)
    loss.backward()

    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, tensor in tensors.items():
        if (name == "hidden") == (frozen == "hidden"):
            assert tensor is not None
            assert tensor.grad is None
        else:
            assert tensor is not None
            assert_close(tensor.grad, expected[name], **EXACT)


def gradients_of(form: Callable[..., Any], hidden: Tensor, head: HeadWeights, targets: Tensor) -> tuple[Tensor, ...]:
    loss, _ = form(hidden, head, targets, terms, HeadSpec(chunk_tokens=5), temperature=1.0, entropy=True)
    return torch.autograd.grad(loss, leaves(hidden, head))


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_rank_without_tokens_still_gives_every_parameter_a_gradient_of_zeros(form: Callable[..., Any]) -> None:
    hidden, head, targets = draw(bias=True, tokens=0)

    loss, scores = form(hidden, head, targets, terms_of_nothing, HeadSpec(), temperature=0.7, entropy=True)
    loss.backward()

    assert float(loss.detach()) == 0.0
    assert scores.logprobs.numel() == 0
    for leaf in leaves(hidden, head):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def terms_of_nothing(logprobs: Tensor, entropy: Tensor | None, start: int, end: int) -> Tensor:
    return -logprobs


@pytest.mark.parametrize("form", FORMS)
def test_without_gradient_recording_the_values_stay_and_nothing_is_kept(form: Callable[..., Any]) -> None:
    hidden, head, targets = draw(bias=True)
    expected, kept = form(hidden, head, targets, terms, HeadSpec(softcap=2.0), temperature=0.9, entropy=True)

    with torch.no_grad():
        loss, scores = form(hidden, head, targets, terms, HeadSpec(softcap=2.0), temperature=0.9, entropy=True)

    assert not loss.requires_grad
    assert not scores.logprobs.requires_grad
    assert torch.equal(loss, expected.detach())
    assert torch.equal(scores.logprobs, kept.logprobs.detach())


def test_bfloat16_states_are_normalised_in_float32() -> None:
    hidden, head, targets = draw(bias=False, dtype=torch.bfloat16)
    logits = (hidden @ head.weight.t()).detach().double()  # the product itself is rounded to bfloat16
    expected = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    scores = score(hidden, head, targets, HeadSpec(chunk_tokens=5), entropy=True)

    assert scores.logprobs.dtype == torch.float32
    assert_close(scores.logprobs.detach().double(), expected, rtol=0, atol=1e-6)
    assert scores.entropy is not None
    assert_close(
        scores.entropy.detach().double(), -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
def test_float32_product_multiplies_bfloat16_states_without_rounding_the_logits(form: Callable[..., Any]) -> None:
    hidden, head, targets = draw(bias=True, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves(hidden, head)]
    expected, _ = plain(wide[0], HeadWeights(wide[1], wide[2]), targets, HeadSpec(), 1.0)
    gradients = torch.autograd.grad(terms(expected, None, 0, TOKENS).sum(), wide)

    loss, scores = form(hidden, head, targets, terms, HeadSpec(float32_product=True, chunk_tokens=5))
    found = torch.autograd.grad(loss, leaves(hidden, head))

    assert_close(scores.logprobs.detach().double(), expected.detach(), rtol=0, atol=2e-6)
    for mine, theirs in zip(found, gradients, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_close(mine, theirs.to(torch.bfloat16), rtol=2**-7, atol=1e-5)  # one rounding, at the very end


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", ["chunk_tokens", "kernel_tokens"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_adds_products_of_bfloat16_in_float32(form: Callable[..., Any], chunk: str) -> None:
    hidden, head, targets = draw(bias=True, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves(hidden, head)]
    expected, _ = plain(wide[0], HeadWeights(wide[1], wide[2]), targets, HeadSpec(), 1.0)
    gradients = torch.autograd.grad(terms(expected, None, 0, TOKENS).sum(), wide)
    moved = [tensor.detach().cuda().requires_grad_() for tensor in leaves(hidden, head)]

    def terms_there(logprobs: Tensor, entropy: Tensor | None, start: int, end: int) -> Tensor:
        return terms(logprobs.cpu(), None if entropy is None else entropy.cpu(), start, end).cuda()

    spec = HeadSpec(float32_product=True, **{chunk: 5})
    loss, scores = form(moved[0], HeadWeights(moved[1], moved[2]), targets.cuda(), terms_there, spec)
    found = torch.autograd.grad(loss, moved)

    assert_close(scores.logprobs.detach().double().cpu(), expected.detach(), rtol=0, atol=2e-6)
    for mine, theirs in zip(found, gradients, strict=True):
        assert_close(mine.cpu(), theirs.to(torch.bfloat16), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("logit", [3.0, 6.5, 9.0])
def test_a_nearly_certain_token_still_has_a_gradient_in_bfloat16(form: Callable[..., Any], logit: float) -> None:
    """Of two tokens with logits h and 0, -log p of the first has the derivative p - 1 by h: at h = 6.5, -1.501e-3."""
    hidden = torch.full((1, 1), logit, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)

    form(hidden, HeadWeights(weight, None), torch.tensor([0]), lambda logprobs, *_: -logprobs, HeadSpec())[0].backward()

    rest = 1 / (1 + math.exp(logit))
    assert_close(hidden.grad, torch.full_like(hidden, -rest), rtol=2**-7, atol=0.0)
    assert_close(weight.grad, torch.tensor([[-rest], [rest]], dtype=torch.bfloat16) * logit, rtol=2**-6, atol=0.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("by_entropy", [0.0, 0.01])
@pytest.mark.parametrize("size", [9.0, 12.0, 15.0, 17.0])
def test_gradients_in_bfloat16_are_as_exact_at_any_certainty(
    form: Callable[..., Any], softcap: float | None, by_entropy: float, size: float
) -> None:
    """Hidden states that lie along their token's row make it from 40 to 99.99 % certain."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 64, generator=generator) * 0.1
    targets = torch.randint(0, 1024, (32,), generator=generator)
    along = size * torch.nn.functional.normalize(weight[targets], dim=1) / weight[targets].norm(dim=1, keepdim=True)
    mine = [tensor.bfloat16().requires_grad_() for tensor in (along, weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in mine]

    def loss(logprobs: Tensor, entropy: Tensor | None, *_: int) -> Tensor:
        return -logprobs if entropy is None else -logprobs - by_entropy * entropy

    spec = HeadSpec(softcap=softcap)
    form(mine[0], HeadWeights(mine[1], None), targets, loss, spec, entropy=by_entropy > 0)[0].backward()
    logprobs, entropies = plain(exact[0], HeadWeights(exact[1], None), targets, spec, 1.0)
    (-logprobs - by_entropy * entropies).sum().backward()

    for tensor, wanted in zip(mine, exact, strict=True):
        assert tensor.grad is not None
        assert wanted.grad is not None
        error = (tensor.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 2**-6


@pytest.mark.parametrize("form", FORMS)
def test_head_gradients_of_bfloat16_states_are_summed_over_chunks_in_float32(form: Callable[..., Any]) -> None:
    tokens = 600
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)

    loss, _ = form(hidden, HeadWeights(weight, None), targets, lambda logprobs, *_: -logprobs, HeadSpec(chunk_tokens=1))
    loss.backward()

    # Each token adds -1/2 and +1/2; a bfloat16 sum of halves would stick at 128.
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-300.0, 300.0]


@pytest.mark.parametrize("form", FORMS)
def test_huge_logits_stay_finite(form: Callable[..., Any]) -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    targets = torch.tensor([1, 1])

    loss, scores = form(
        hidden, HeadWeights(weight, None), targets, lambda logprobs, *_: -logprobs, HeadSpec(), entropy=True
    )
    loss.backward()

    assert scores.logprobs.tolist() == [-2e4, 0.0]
    assert scores.entropy is not None
    assert scores.entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [2.0, 0.0]


def fair_accuracy(logits: Any, targets: Any) -> Any:
    """Return [N]: the chance that a fair draw among the largest logits of a row hits its target."""
    logits, targets = np.asarray(logits), np.asarray(targets)
    largest = logits == logits.max(-1, keepdims=True)
    return np.where(largest[np.arange(len(targets)), targets], 1 / largest.sum(-1), 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_accuracy_is_that_of_a_fair_draw_among_the_largest_logits(form: Callable[..., Any]) -> None:
    rows = np.array([[2, 2, 1, 0], [1, 3, 2, 0], [0, 0, 0, 0], [3, 3, 1, 3], [-1, -2, -1, -3]], dtype=np.float32)
    # Apart by less than what the exponential of their difference tells from 1.
    rows = np.concatenate([rows, [[1e-9, 0, 1e-9, -1]]]).astype(np.float32)
    head = HeadWeights(torch.from_numpy(rows.T.copy()), None)
    spec = HeadSpec(chunk_tokens=4)

    for token in range(4):
        targets = torch.full((len(rows),), token)
        _, scores = form(torch.eye(len(rows)), head, targets, lambda logprobs, *_: -logprobs, spec)

        assert scores.accuracy.dtype == torch.float32
        np.testing.assert_allclose(scores.accuracy.numpy(), fair_accuracy(rows, targets.numpy()), rtol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_accuracy_counts_the_ties_that_bfloat16_makes_by_rounding(form: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(400, WIDTH, generator=generator).bfloat16()
    weight = torch.randn(200, WIDTH, generator=generator).bfloat16()
    logits = (hidden @ weight.t()).float()
    targets = logits.argmax(-1)
    expected = fair_accuracy(logits.numpy(), targets.numpy())

    _, scores = form(hidden, HeadWeights(weight, None), targets, lambda logprobs, *_: -logprobs, HeadSpec())

    assert (expected < 1).sum() >= 4
    np.testing.assert_allclose(scores.accuracy.numpy(), expected, rtol=1e-7)


def test_a_row_without_numbers_predicts_nothing_right() -> None:
    hidden = torch.tensor([[math.nan], [1.0]])

    scores = score(hidden, HeadWeights(torch.ones(4, 1), None), torch.tensor([0, 0]), HeadSpec())

    assert scores.accuracy.tolist() == [0.0, 0.25]


MEASURE = """
import json, sys, torch
from itertools import accumulate
from pathlib import Path
from torch import nn
from torch.profiler import ProfilerActivity, profile
from holdfast.models.layers.family import HeadSpec
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.scores import score, separable_loss

def peak(trace):
    # by what the profiler saw allocated and freed: what a process has in memory depends on its machine
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    return max(accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]))) // 1024

torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(2048, 64, requires_grad=True)
weight = torch.randn(32_000, 64) * 0.1
targets = torch.randint(0, 32_000, (2048,))

def run(form, tokens):
    states, chosen = hidden[:tokens], targets[:tokens]
    if form == "full":
        loss = nn.functional.cross_entropy(states @ weight.t(), chosen, reduction="sum")
    elif form == "score":
        loss = -score(states, HeadWeights(weight, None), chosen, HeadSpec()).logprobs.sum()
    else:
        loss, _ = separable_loss(states, HeadWeights(weight, None), chosen, lambda logprobs, *_: -logprobs, HeadSpec())
    loss.backward()

def measure(form, tokens, frozen):
    weight.requires_grad_(not frozen)
    run(form, 8)
    hidden.grad = weight.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(form, tokens)
    trace = Path(sys.argv[1])
    profiler.export_chrome_trace(str(trace))
    return peak(trace)

found = {"full": measure("full", 2048, False)}
for form in ("score", "one pass"):
    found[form] = measure(form, 2048, False)
    found[form + ", short"] = measure(form, 256, False)
    found[form + ", short, frozen head"] = measure(form, 256, True)
print(json.dumps(found))
"""
LOGITS_KB = 2048 * 32_000 * 4 / 1024
CHUNK_KB = LOGITS_KB / 8  # 32 MiB of logits are 256 tokens of this vocabulary
HEAD_KB = 32_000 * 64 * 4 / 1024


@pytest.fixture(scope="module")
def peak_kilobytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return how far the memory of tensors rises during forward and backward passes, by what they were."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path_factory.mktemp("traces") / "trace.json")]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found: dict[str, int] = json.loads(text)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["score", "one pass"])
def test_the_logits_of_a_whole_sequence_are_never_in_memory(peak_kilobytes: dict[str, int], form: str) -> None:
    assert peak_kilobytes["full"] > 2 * LOGITS_KB  # logits and their gradient, at least
    assert peak_kilobytes[form] < 0.35 * peak_kilobytes["full"]
    assert peak_kilobytes[form] < 1.2 * CHUNK_KB + 1.2 * HEAD_KB  # one chunk, and the gradient of the head


@pytest.mark.parametrize("form", ["score", "one pass"])
def test_a_frozen_head_has_no_gradient_in_memory(peak_kilobytes: dict[str, int], form: str) -> None:
    saved = peak_kilobytes[f"{form}, short"] - peak_kilobytes[f"{form}, short, frozen head"]

    assert saved > 0.9 * HEAD_KB


def test_a_product_in_another_dtype_is_added_in_slices_that_leave_no_row_out() -> None:
    vocabulary, size = 1100, 2**15  # slices of 512 rows
    generator = np.random.default_rng(0)
    by_logits = generator.integers(-4, 5, (3, vocabulary)).astype(np.float32)
    states = generator.integers(-4, 5, (3, size)).astype(np.float32)
    total = torch.ones(vocabulary, size)

    add_product(total, torch.from_numpy(by_logits).bfloat16(), torch.from_numpy(states).bfloat16())

    np.testing.assert_array_equal(total.numpy(), 1 + by_logits.T @ states)  # small whole numbers: exact in both


@pytest.mark.parametrize("support", [Support(top_k=5), Support(top_p=0.6), Support(top_k=9, top_p=0.8, min_p=0.1)])
@pytest.mark.parametrize("separable", [True, False])
def test_log_probabilities_over_a_support_and_their_gradients_are_autograds(support: Support, separable: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(32, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 32, (40,), generator=draw)
    factors = torch.randn(40, generator=draw, dtype=torch.float64)
    logits = hidden @ weight.t() / 0.7
    probabilities = logits.detach().softmax(-1)
    out = torch.zeros_like(logits, dtype=torch.bool)
    for row, ordered in enumerate(logits.argsort(-1, descending=True).tolist()):
        total, largest, left = 0.0, None, []
        for token in ordered[: support.top_k]:
            left.append(token)
        whole = float(probabilities[row, left].sum())
        for token in left:
            share = float(probabilities[row, token]) / whole
            out[row, token] = total >= support.top_p
            total += share
            largest = share if largest is None else largest
        for token in ordered:
            if token not in left or float(probabilities[row, token]) / whole < support.min_p * (largest or 0):
                out[row, token] = True
    out[torch.arange(40), targets] = False
    expected = logits.masked_fill(out, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted_gradients = torch.autograd.grad((expected * factors).sum(), (hidden, weight))

    spec, head = HeadSpec(support=support, chunk_tokens=16), HeadWeights(weight, None)
    if separable:
        loss, scores = separable_loss(
            hidden, head, targets, lambda logprobs, _, start, end: logprobs * factors[start:end], spec, temperature=0.7
        )
    else:
        scores = score(hidden, head, targets, spec, temperature=0.7)
        loss = (scores.logprobs * factors).sum()
    made = torch.autograd.grad(loss, (hidden, weight))

    torch.testing.assert_close(scores.logprobs.detach(), expected.detach(), rtol=1e-10, atol=1e-10)
    for one, other in zip(made, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
