"""What torch's variable-length kernel is handed on CUDA, checked without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from holdfast.models.layers.attention import flash_call, flash_takes, packed_attention
from holdfast.models.layers.document_attention import AttentionOptions, Documents

LENGTHS = (4, 4, 7)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def varlen_attn_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The signature in torch 2.11's wheel."""
    raise NotImplementedError


GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel of the torch that runs these tests takes fewer key heads than query heads; torch 2.11 does not."""

FORMS = [
    pytest.param(varlen_attn, GROUPS, id="this torch"),
    pytest.param(varlen_attn_of_torch_2_11, False, id="torch 2.11"),
]


def inputs(key_heads: int = KEY_HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, key_heads, key_heads)
    query, key, value = (torch.randn(1, each, sum(LENGTHS), SIZE, generator=generator) for each in heads)
    return query, key, value


def documents() -> Documents:
    return Documents.of(LENGTHS, torch.device("cpu"))


def bound(kernel: Callable[..., Any], groups: bool, window: int | None, key_heads: int = KEY_HEADS) -> dict[str, Any]:
    arguments, options = flash_call(
        *inputs(key_heads), documents().runs, AttentionOptions(0.7, window, None, 0.0), groups=groups
    )
    call = inspect.signature(kernel).bind(*arguments, **options)
    call.apply_defaults()
    return dict(call.arguments)


def kernel_by_definition(call: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Compute what torch documents the kernel to compute, token by token."""
    query, key, value = (call[name].double().numpy() for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        assert call["enable_gqa"]
    left, right = call["window_size"]
    assert right == 0  # causal
    out = np.zeros_like(query)
    for start, end in zip(call["cu_seq_q"][:-1].tolist(), call["cu_seq_q"][1:].tolist(), strict=True):
        assert end - start <= call["max_q"]
        for position in range(start, end):
            first = start if left == -1 else max(start, position - left)
            for head in range(query.shape[1]):
                seen = key[first : position + 1, head // groups]
                weights = np.exp(seen @ query[position, head] * call["scale"])
                out[position, head] = weights @ value[first : position + 1, head // groups] / weights.sum()
    return out


@pytest.mark.parametrize(("kernel", "groups"), FORMS)
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
def test_the_call_means_what_packed_attention_computes_on_the_cpu(
    kernel: Callable[..., Any], groups: bool, window: int | None, key_heads: int
) -> None:
    query, key, value = inputs(key_heads)
    options: dict[str, Any] = {"documents": documents(), "sliding_window": window}
    expected, _ = packed_attention(torch.nn.Module(), query, key, value, None, scaling=0.7, **options)

    found = kernel_by_definition(bound(kernel, groups, window, key_heads))

    np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-6)


def test_torch_2_11_gets_key_heads_repeated_and_no_unknown_word() -> None:
    call = bound(varlen_attn_of_torch_2_11, groups=False, window=None)

    key = inputs()[1][0].transpose(0, 1)
    assert call["key"].shape == (sum(LENGTHS), HEADS, SIZE)
    assert torch.equal(call["key"], key[:, [0, 0, 1, 1]])


def test_offsets_are_int32_and_the_longest_document_is_named() -> None:
    call = bound(varlen_attn, groups=GROUPS, window=None)

    assert call["cu_seq_q"].dtype == call["cu_seq_k"].dtype == torch.int32
    assert call["cu_seq_q"].tolist() == [0, 4, 8, 15]
    assert (call["max_q"], call["max_k"]) == (7, 7)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, (-1, 0)), (1, (0, 0)), (4096, (4095, 0))], ids=["none", "itself alone", "Mistral"]
)
def test_a_window_of_w_tokens_is_w_minus_one_to_the_left(window: int | None, expected: tuple[int, int]) -> None:
    assert bound(varlen_attn, groups=GROUPS, window=window)["window_size"] == expected


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "takes"),
    [
        ("cuda", torch.bfloat16, (64, 64), True),
        ("cuda", torch.float16, (256, 256), True),
        ("cuda", torch.float32, (64, 64), False),
        ("cpu", torch.bfloat16, (64, 64), False),
        pytest.param("cuda", torch.bfloat16, (192, 128), False, id="DeepSeek's values are narrower"),
        pytest.param("cuda", torch.bfloat16, (60, 60), False, id="no multiple of 8"),
        pytest.param("cuda", torch.bfloat16, (512, 512), False, id="too wide"),
    ],
)
def test_heads_that_the_kernel_does_not_take_go_elsewhere(
    device: str, dtype: torch.dtype, sizes: tuple[int, int], takes: bool
) -> None:
    assert flash_takes(device, dtype, *sizes) is takes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("sizes", [(64, 64), (64, 32), (60, 60)], ids=str)
def test_the_kernel_agrees_with_the_cpu(window: int | None, sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, sum(LENGTHS), sizes[0], generator=generator) for heads in (HEADS, KEY_HEADS))
    value = torch.randn(1, KEY_HEADS, sum(LENGTHS), sizes[1], generator=generator)
    half = [tensor.to(torch.bfloat16) for tensor in (query, key, value)]
    on_gpu = {"documents": Documents.of(LENGTHS, torch.device("cuda")), "sliding_window": window}
    on_cpu = {"documents": documents(), "sliding_window": window}

    found, _ = packed_attention(torch.nn.Module(), *(tensor.cuda() for tensor in half), None, **on_gpu)

    expected, _ = packed_attention(torch.nn.Module(), *(tensor.float() for tensor in half), None, **on_cpu)
    torch.testing.assert_close(found.float().cpu(), expected, rtol=2e-2, atol=2e-2)
