"""The Triton kernels of the head by Triton's interpreter, against float64 of the same stored logits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.models.chunks.form import ScoreOptions, Slopes, Statistics
from holdfast.models.chunks.kernel_form import KernelForm, why_no_triton
from holdfast.models.chunks.logits import HeadWeights, scaled
from holdfast.models.layers.family import HeadSpec
from holdfast.models.support import Support

if why_no_triton() or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

# `where` computes both sides, and the interpreter's numpy says so of infinities that a GPU passes over.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Of slopes, in relative norm."""
NOTHING = 1e-15
"""Of slopes where one token has all the probability that float64 can tell apart."""
VOCABULARIES = [2, 3, 31, 127, 1000, 1024, 4095, 4096, 4097, 5003, 8192, 8193, 9001, 12289]
KINDS = ["flat", "spread", "eighty", "certain", "one of all", "support"]


@dataclass(frozen=True)
class Case:
    """A chunk as it is stored, and how logits follow from it."""

    stored: Tensor
    targets: Tensor
    bias: Tensor | None
    spec: HeadSpec
    temperature: float
    entropy: bool


def drawn(seed: int) -> Case:
    generator = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    rows = int(generator.choice([1, 1, 2, 5, 16]))
    vocabulary = int(generator.choice(VOCABULARIES))
    dtype = torch.bfloat16 if generator.random() < 0.5 else torch.float32
    values = generator.standard_normal((rows, vocabulary)) * {"flat": 0.1, "spread": 4.0}.get(kind, 2.0)
    targets = generator.integers(0, vocabulary, rows)
    targets[generator.random(rows) < 0.3] = 0
    targets[generator.random(rows) < 0.3] = vocabulary - 1
    if kind == "eighty":
        values = generator.choice([-80.0, 80.0, 79.5, 0.0], (rows, vocabulary))
    likely = np.where(generator.random(rows) < 0.5, targets, generator.integers(0, vocabulary, rows))
    if kind in {"certain", "one of all"}:
        values *= 0.3
        # All others together have between 1e-6 and 1e-9; float64 sees no less than 1e-16 beside 1.
        lead = generator.uniform(14, 20, rows) if kind == "certain" else np.full(rows, 100.0)
        values[np.arange(rows), likely] = np.log(vocabulary) + lead
    capped, plain = bool(generator.random() < 0.3), kind in {"eighty", "certain", "one of all"}
    spec = HeadSpec(
        scale=1.0 if plain else float(generator.choice([1.0, 0.25, 1.7])),
        softcap=float(generator.choice([2.0, 5.0, 30.0])) if capped and not plain else None,
        kernel_tokens=16,
        support=Support(top_k=int(generator.choice([1, 1, 5])), top_p=float(generator.choice([1.0, 0.7])))
        if kind == "support"
        else None,
    )
    bias = torch.from_numpy(generator.standard_normal(vocabulary)).to(dtype)
    return Case(
        torch.from_numpy(values).to(dtype),
        torch.from_numpy(targets),
        bias if generator.random() < 0.4 and not plain else None,
        spec,
        1.0 if generator.random() < 0.5 or plain else float(generator.choice([0.6, 1.3])),
        bool(generator.random() < 0.5),
    )


def swept(case: Case, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Statistics, Slopes]:
    """Return what the kernels make of stored logits, which one-hot states take out of the matrix as they are."""
    rows = len(case.targets)
    head = HeadWeights(case.stored.t().contiguous(), case.bias)
    form = KernelForm(head, ScoreOptions(case.spec, case.temperature, case.entropy, want_gradients=True))
    statistics = form.statistics(torch.eye(rows, dtype=case.stored.dtype), case.targets)
    return statistics, form.slopes(statistics, case.targets, by_logprob, by_entropy if case.entropy else None)


def exact(case: Case, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies, accuracies and slopes in float64, by autograd."""
    stored = case.stored.double().requires_grad_()
    logits = stored if case.bias is None else stored + case.bias.double()
    logits = logits * case.spec.scale
    if case.spec.softcap is not None:
        logits = case.spec.softcap * torch.tanh(logits / case.spec.softcap)
    logits = logits / case.temperature
    if case.spec.support is not None:
        rounded, _ = scaled(case.stored.float().clone(), case.bias, case.spec, case.temperature)
        out = case.spec.support.restrict(rounded, case.targets) == float("-inf")
        logits = logits.masked_fill(out, float("-inf"))
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, case.targets[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e6)).sum(-1)  # 0 for what is left out, and its slope too
    loss = (chosen * by_logprob.double()).sum()
    if case.entropy:
        loss = loss + (entropies * by_entropy.double()).sum()
    loss.backward()
    assert stored.grad is not None
    largest = logits == logits.amax(-1, keepdim=True)
    hit = largest.gather(1, case.targets[:, None])[:, 0]
    return chosen.detach(), entropies.detach(), hit / largest.sum(-1), stored.grad


def gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to values beyond 1."""
    return float(((found.double() - expected) / expected.abs().clamp(min=1.0)).abs().max())


@pytest.mark.parametrize("seed", range(200))
def test_statistics_and_slopes_are_those_of_float64(seed: int) -> None:
    case = drawn(seed)
    generator = torch.Generator().manual_seed(seed)
    by_logprob, by_entropy = torch.randn(2, len(case.targets), generator=generator)

    statistics, slopes = swept(case, by_logprob, by_entropy)
    logprobs, entropies, accuracy, expected = exact(case, by_logprob, by_entropy)

    assert gap(statistics.logprobs, logprobs) < 1e-6
    if case.entropy:
        assert statistics.entropy is not None
        assert gap(statistics.entropy, entropies) < 1e-6
    if case.spec.softcap is None:  # a capped logit is rounded before it is compared
        np.testing.assert_allclose(statistics.accuracy.numpy(), accuracy.numpy(), rtol=1e-6)
    assert slopes.factor is None
    assert slopes.matrix.dtype == case.stored.dtype
    difference = float((slopes.matrix.double() - expected).norm())
    assert difference < max(LARGEST_ERROR[case.stored.dtype] * float(expected.norm()), NOTHING)
