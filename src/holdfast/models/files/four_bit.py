"""Frozen matrices in 4 bits (QLoRA, Dettmers et al., arXiv:2305.14314): the layout of packed rows, and a linear layer.

bitsandbytes quantises and dequantises; the layout is ours. Its own parameter class stores scales outside of the tensor,
where neither FSDP2 nor a checkpoint sees them. Here each row of the matrix is a row of bytes: its codes, followed by
the scales of its blocks. No block crosses a row, so rows can be sharded, gathered, hashed and saved like any other
tensor. Deviation: the scales are not quantised a second time, which would join rows; with float32 scales a number
takes 4.5 bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from holdfast.config.quiet import broken
from holdfast.config.sections.model import FourBitKind
from holdfast.config.versions import installed
from holdfast.errors import ModelError
from holdfast.models.names import canonical_name

QUANTIZED_BLOCK = 64
"""Numbers that share a scale."""


def check_library(kind: FourBitKind) -> None:
    """Import the library that rounds to four bits and expands again.

    Raises:
        ModelError: The library cannot be imported.
    """
    reason = "it is not installed" if installed("bitsandbytes") is None else broken("bitsandbytes")
    if not reason and importlib.util.find_spec("bitsandbytes") is None:
        reason = "ModuleNotFoundError, though it is installed"
    if reason:
        raise ModelError(
            f"model.lora.quantize: {kind} rounds by bitsandbytes: {reason}. Install it: pip install -U "
            "'holdfast[qlora]'. Without it, model.frozen_dtype: bfloat16 keeps the frozen model in half of float32."
        )


def row_bytes(columns: int) -> int:
    """Return how many bytes a row takes."""
    blocks = -(-columns // QUANTIZED_BLOCK)
    return blocks * (QUANTIZED_BLOCK // 2 + 4)


def packed(rows: Tensor, kind: FourBitKind) -> Tensor:
    """Return [rows, row_bytes] uint8 of [rows, columns], on the CPU; the same whatever rows are packed together."""
    from bitsandbytes.functional import quantize_4bit

    if not rows.shape[0]:
        return torch.empty(0, row_bytes(rows.shape[1]), dtype=torch.uint8)
    filled = pad(rows.cpu().float(), (0, -rows.shape[1] % QUANTIZED_BLOCK)).contiguous()
    codes, state = quantize_4bit(filled, blocksize=QUANTIZED_BLOCK, compress_statistics=False, quant_type=kind)
    scales = state.absmax.float().contiguous().view(torch.uint8)
    return torch.cat([codes.view(rows.shape[0], -1), scales.view(rows.shape[0], -1)], dim=1)


def unpacked(rows: Tensor, columns: int, kind: FourBitKind, dtype: torch.dtype) -> Tensor:
    """Return [rows, columns] numbers of what `packed` returned; float64 holds what float32 does."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    blocks = -(-columns // QUANTIZED_BLOCK)
    codes = rows[:, : blocks * QUANTIZED_BLOCK // 2].contiguous()
    scales = rows[:, blocks * QUANTIZED_BLOCK // 2 :].contiguous().view(torch.float32).flatten()
    shape = (rows.shape[0], blocks * QUANTIZED_BLOCK)
    matrix: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scales, QUANTIZED_BLOCK, kind, shape, narrow
    )
    return matrix[:, :columns].to(dtype)


class _Product(torch.autograd.Function):
    """x W^T; saves the packed W for the backward pass and dequantises it again there, to save memory."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rows: Tensor, columns: int, kind: FourBitKind) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.columns, ctx.kind = columns, kind
        return linear(inputs, unpacked(rows, columns, kind, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return gradient @ unpacked(rows, ctx.columns, ctx.kind, gradient.dtype), None, None, None


class FourBitLinear(nn.Linear):
    """A linear layer whose `weight` is packed, [out, row_bytes(in)] uint8.

    Args:
        layer: The layer to replace, on the meta device; its bias is kept.
        kind: The 4-bit data type.
        dtype: Dtype of the matrix in exports.
    """

    def __init__(self, layer: nn.Linear, kind: FourBitKind, dtype: torch.dtype) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        rows = torch.empty(self.out_features, row_bytes(self.in_features), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.bias = layer.bias
        self.kind: FourBitKind = kind
        self.written_dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """Return x W^T + b in the dtype of x."""
        # An older FSDP2 gathers integers in the dtype it computes in, which holds those up to 255 exactly.
        rows, bias = self.weight.to(torch.uint8), cast("Tensor | None", self.bias)
        product: Tensor = _Product.apply(inputs, rows, self.in_features, self.kind)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias.to(product.dtype)


def quantise(model: Any, kind: FourBitKind, dtype: torch.dtype) -> list[FourBitLinear]:
    """Replace the frozen linear layers of a language model's blocks, on the meta device; return what stands there now.

    Its output layer, embeddings, norms, towers, stacks of experts and what is trained stay as they are.

    Raises:
        ModelError: No layer can be replaced, or bitsandbytes is missing.
    """
    check_library(kind)
    output = model.get_output_embeddings()
    frozen = [
        (parent, name, layer)
        for parent in model.get_decoder().modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and layer is not output and not layer.weight.requires_grad
    ]
    if not frozen:
        raise ModelError(
            f"model.lora.quantize: {kind}, but {model.config.model_type} has no frozen linear layer. Leave it out."
        )
    layers = []
    for parent, name, layer in frozen:
        layers.append(FourBitLinear(layer, kind, dtype))
        setattr(parent, name, layers[-1])
    return layers


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Yield the canonical name of each packed matrix, and its layer."""
    for path, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            yield canonical_name(f"{path}.weight"), module
