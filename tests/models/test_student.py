"""A comparison with a teacher in chunks is that of full logits of both; no logits of a sequence are ever in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.heads.student import distilled
from holdfast.models.layers.family import HeadSpec
from holdfast.objectives.supervised import Distillation
from tests.models.test_scores import draw, fair_accuracy, leaves, plain
from tests.oracle import distillation as oracle

TOKENS, WIDTH, VOCABULARY = 13, 4, 31
EXACT = {"rtol": 1e-10, "atol": 1e-10}
TAUGHT = HeadSpec(scale=0.7, softcap=2.5)
"""The teacher's head is another one than the student's, with a hidden size of its own."""

CASES = [
    pytest.param(HeadSpec(chunk_tokens=5), 0.5, 1.0, 0.0, False, VOCABULARY, id="jsd"),
    pytest.param(HeadSpec(chunk_tokens=1), 0.0, 1.0, 0.0, False, VOCABULARY, id="forward, chunks of 1"),
    pytest.param(HeadSpec(), 1.0, 1.0, 0.0, True, VOCABULARY, id="reverse, bias"),
    pytest.param(HeadSpec(chunk_tokens=5), 0.2, 1.7, 0.0, False, VOCABULARY, id="temperature"),
    pytest.param(HeadSpec(chunk_tokens=5), 0.9, 1.0, 0.4, False, VOCABULARY, id="with likelihood"),
    pytest.param(HeadSpec(1.4, 1.7, chunk_tokens=5), 0.3, 0.6, 0.4, True, VOCABULARY, id="all at once"),
    pytest.param(
        HeadSpec(1.4, 1.7, chunk_tokens=5), 0.3, 0.6, 0.4, True, VOCABULARY + 3, id="a teacher with more rows"
    ),
    pytest.param(HeadSpec(chunk_tokens=5), 1.0, 1.0, 0.4, True, VOCABULARY - 3, id="a teacher with fewer rows"),
]


def teachers(rows: int) -> tuple[Tensor, HeadWeights]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return hidden, HeadWeights(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), None)


def full_logits(hidden: Tensor, head: HeadWeights, spec: HeadSpec) -> Tensor:
    logits = hidden @ head.weight.t()
    logits = (logits if head.bias is None else logits + head.bias) * spec.scale
    return logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)


@pytest.mark.parametrize(("spec", "beta", "temperature", "sft", "bias", "rows"), CASES)
def test_values_and_gradients_are_those_of_full_logits(  # noqa: PLR0913, PLR0917 - one per option
    spec: HeadSpec, beta: float, temperature: float, sft: float, bias: bool, rows: int
) -> None:
    hidden, head, targets = draw(bias=bias)
    targets = targets % 28
    weights = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    states, taught = teachers(rows)
    own, theirs = full_logits(hidden, head, spec), full_logits(states, taught, TAUGHT)
    shared = min(own.shape[1], rows)
    _, divergence = oracle.losses(own[:, :shared], theirs[:, :shared], targets, beta, temperature)
    logprobs, entropy = plain(hidden, head, targets, spec, 1.0)
    expected = ((divergence - sft * logprobs) * weights).sum()
    gradients = torch.autograd.grad(expected * 3.0, leaves(hidden, head))
    loss = Distillation(beta, temperature, sft)

    found, scores, sums = distilled(
        hidden, head, targets, weights, loss, spec, lambda look: look(TAUGHT, states, taught), entropy=True
    )
    derivatives = torch.autograd.grad(found * 3.0, leaves(hidden, head))

    assert_close(found, expected, **EXACT)
    for mine, other in zip(derivatives, gradients, strict=True):
        assert_close(mine, other, **EXACT)
    assert_close(scores.logprobs, logprobs.detach(), **EXACT)
    assert_close(scores.entropy, entropy.detach(), **EXACT)
    np.testing.assert_allclose(scores.accuracy.numpy(), fair_accuracy(own.detach(), targets), rtol=1e-7)
    by_teacher = -theirs[:, :shared].log_softmax(-1).gather(1, targets[:, None]).sum()
    agree = (own[:, :shared].argmax(-1) == theirs[:, :shared].argmax(-1)).sum()
    assert_close(sums["divergence"], torch.stack([divergence.sum().detach(), torch.tensor(13.0).double()]), **EXACT)
    assert_close(sums["teacher/nll"][0], by_teacher, **EXACT)
    assert shared < own.shape[1] or float(sums["teacher/agreement"][0]) == float(agree)


def test_accuracy_of_a_student_is_that_of_a_fair_draw_among_the_largest_logits() -> None:
    rows = np.array([[2, 2, 1, 0], [1, 3, 2, 0], [0, 0, 0, 0], [3, 3, 1, 3]], dtype=np.float32)
    states, head = torch.eye(4), HeadWeights(torch.from_numpy(rows.T.copy()), None)

    for token in range(4):
        targets = torch.full((4,), token)
        _, scores, _ = distilled(
            states, head, targets, torch.ones(4), Distillation(0.5), HeadSpec(chunk_tokens=3),
            lambda look: look(HeadSpec(), states, head),
        )  # fmt: skip

        np.testing.assert_allclose(scores.accuracy.numpy(), fair_accuracy(rows, targets), rtol=1e-7)


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_unchanged(frozen: str) -> None:
    hidden, head, targets = draw(bias=True)
    states, taught = teachers(VOCABULARY)

    def derivatives(*wanted: Tensor) -> tuple[Tensor | None, ...]:
        total, _, _ = distilled(
            hidden, head, targets, torch.ones(TOKENS), Distillation(0.5), HeadSpec(),
            lambda look: look(TAUGHT, states, taught),
        )  # fmt: skip
        return torch.autograd.grad(total, wanted)

    live = [hidden] if frozen == "head" else [part for part in head if part is not None]
    expected = derivatives(*live)
    for part in leaves(hidden, head):
        part.requires_grad_(any(part is one for one in live))
    found = derivatives(*live)

    for mine, other in zip(found, expected, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


def test_a_rank_without_tokens_still_has_a_loss_to_run_backwards() -> None:
    hidden, head, _ = draw(bias=False, tokens=0)
    states, taught = teachers(VOCABULARY)
    none = torch.zeros(0)

    total, _, sums = distilled(
        hidden, head, none.long(), none, Distillation(0.5), HeadSpec(), lambda look: look(TAUGHT, states[:0], taught)
    )
    total.backward()

    assert total.item() == 0.0
    assert sums["divergence"].tolist() == [0.0, 0.0]
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


MEASURE = """
import json, torch
from pathlib import Path
from holdfast.models.layers.family import HeadSpec
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.heads.student import distilled
from holdfast.objectives.supervised import Distillation

def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)

torch.set_num_threads(1)
torch.manual_seed(0)
VOCABULARY, TOKENS = 32_000, 1024
hidden = torch.randn(TOKENS, 32, requires_grad=True)
weight = torch.randn(VOCABULARY, 32) * 0.1
states, taught = torch.randn(TOKENS, 48), torch.randn(VOCABULARY, 48) * 0.1
targets = torch.randint(0, VOCABULARY, (TOKENS,))

def run(form, tokens):
    if form == "full":
        own = (hidden[:tokens] @ weight.t()).log_softmax(-1)
        other = (states[:tokens] @ taught.t()).log_softmax(-1)
        loss = torch.nn.functional.kl_div(other, own, log_target=True, reduction="sum")
    else:
        loss, _, _ = distilled(
            hidden[:tokens], HeadWeights(weight, None), targets[:tokens], torch.ones(tokens), Distillation(0.5),
            HeadSpec(),
            lambda look: look(HeadSpec(), states[:tokens], HeadWeights(taught, None)),
        )
    loss.backward()

def measure(form, tokens):
    weight.requires_grad_()
    run(form, 8)
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    run(form, tokens)
    return peak() - before

print(json.dumps({"full": measure("full", TOKENS), "chunks": measure("chunks", TOKENS)}))
"""
LOGITS_KB = 1024 * 32_000 * 4 / 1024
CHUNK_KB = 128 * 32_000 * 4 / 1024
"""The smallest chunk there is: 3 of them are 32 MiB at 87 tokens of this vocabulary."""
HEAD_KB = 32_000 * 32 * 4 / 1024


@pytest.mark.slow
def test_the_logits_of_a_whole_sequence_are_never_in_memory() -> None:
    """Two chunks of logits (in float32 the third, the copy for the product, is the logits themselves)."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", MEASURE], env=environment, check=True, capture_output=True, text=True)

    kilobytes: dict[str, Any] = json.loads(done.stdout)

    assert kilobytes["full"] > 4 * LOGITS_KB
    assert kilobytes["chunks"] < 2.2 * CHUNK_KB + 2.2 * HEAD_KB, kilobytes
    assert kilobytes["chunks"] < 0.1 * kilobytes["full"], kilobytes
