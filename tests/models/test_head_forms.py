"""Which form of the head's arithmetic runs: what follows from shapes, what is refused, and what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast.config.load import from_mapping
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.models.check.forward import documents
from holdfast.models.check.head_forms import compare_forms
from holdfast.models.chunks.form import ScoreOptions
from holdfast.models.chunks.kernel_form import KernelForm, kernel_tokens, why_no_kernels, why_no_triton
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.heads.form import described, form_record, use_kernels
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import HeadSpec, family_of
from holdfast.training.setup.head import why_unused
from tests.tiny import tiny_model

GIB = 2**30


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "card", "expected"),
    [
        (151_936, torch.bfloat16, 79 * GIB, 4096),  # 1.2 GiB of logits
        (151_936, torch.float32, 79 * GIB, 3456),  # 2 GiB hold 3,533
        (151_936, torch.bfloat16, 24 * GIB, 2560),  # 0.75 GiB hold 2,650
        (262_144, torch.bfloat16, 8 * GIB, 512),
        (2_000_000, torch.float32, 8 * GIB, 128),
    ],
)
def test_a_chunk_follows_from_shape_dtype_and_the_cards_memory(
    vocabulary: int, dtype: torch.dtype, card: int, expected: int
) -> None:
    assert kernel_tokens(HeadSpec(), vocabulary, dtype, card) == expected
    assert kernel_tokens(HeadSpec(chunk_tokens=7), vocabulary, dtype, card) == 7


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (HeadSpec(), torch.float64, "they take bfloat16 and float32, not float64"),
        (HeadSpec(scale=-1.0), torch.bfloat16, "they take a positive scale of logits, not -1"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(spec: HeadSpec, dtype: torch.dtype, reason: str) -> None:
    assert why_no_kernels(spec, dtype, torch.device("cuda")) == reason


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "they need compute capability 8.0, and the card has 7.5")])
def test_a_card_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    assert why_no_kernels(HeadSpec(), torch.bfloat16, torch.device("cuda")) == reason


@pytest.mark.parametrize("entropy", [False, True])
def test_the_kernels_give_shapes_and_dtypes_where_tensors_hold_no_numbers(entropy: bool) -> None:
    with FakeTensorMode():
        head = HeadWeights(torch.empty(1003, 16, dtype=torch.bfloat16), torch.empty(1003, dtype=torch.bfloat16))
        targets = torch.empty(7, dtype=torch.int64)
        options = ScoreOptions(HeadSpec(softcap=3.0, kernel_tokens=8), 0.7, entropy, want_gradients=True)
        form = KernelForm(head, options)

        statistics = form.statistics(torch.empty(7, 16, dtype=torch.bfloat16), targets)
        slopes = form.slopes(statistics, targets, torch.empty(7), torch.empty(7) if entropy else None)

    assert statistics.logprobs.shape == statistics.accuracy.shape == (7,)
    assert statistics.logprobs.dtype == statistics.accuracy.dtype == torch.float32
    assert (statistics.entropy is not None) == entropy
    assert (slopes.matrix.shape, slopes.matrix.dtype) == ((7, 1003), torch.bfloat16)


@pytest.mark.skipif(not why_no_triton(), reason="Triton is installed here")
def test_without_triton_the_comparison_names_it_and_the_head_is_torchs_again() -> None:
    model = tiny_model("llama")
    spec = replace(family_of(model).head_spec(float32_product=False, chunk_tokens=None), kernel_tokens=16)
    policy = PolicyModel(model, family_of(model), spec)
    first, _, second = documents(policy, None)

    reason, *_ = compare_forms(policy, pack([first, second], [Share(1.0, 1.0)] * 2, padded=False))

    assert reason == "they failed (ModuleNotFoundError: No module named 'triton')"
    assert form_record(policy, torch.device("cpu")) == {"form": "kernels", "chunk_tokens": 16}
    use_kernels(policy, 0)
    record = form_record(policy, torch.device("cpu"))
    assert record is not None
    assert described(record) == "torch's operations, 4,096 tokens at a time"
    assert why_no_triton() == "Triton is not installed (No module named 'triton')"


@pytest.mark.parametrize(
    ("root", "change", "reason"),
    [
        (SFTConfig, {}, ""),
        (SFTConfig, {"objective": {"kind": "nll", "label_smoothing": 0.1}}, "objective.label_smoothing reads the"),
        (DistillConfig, {"teacher": {"path": "t"}}, "the divergence reads the logits of the teacher too"),
        (
            DistillConfig,
            {
                "teacher": {"kind": "server", "url": "http://host:8000/v1"},
                "distill": {"loss": "sampled_reverse_kl"},
                "rollout": {},
            },
            "",
        ),
    ],
)
def test_a_run_whose_training_never_calls_the_kernels_says_why(root: Any, change: dict[str, Any], reason: str) -> None:
    least = {"steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}

    why = why_unused(from_mapping(least | change, root))

    assert why.startswith(reason)
    assert bool(why) == bool(reason)
