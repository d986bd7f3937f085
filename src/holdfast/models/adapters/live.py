"""The adapters that lie in a model, and what a layer's matrix is with its own: pure of how they came there.

peft's modules hold the parameters. A matrix keeps the name it has without an adapter (`canonical_name`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models.names import canonical_name

ADAPTER_NAME = "default"
"""What peft calls our one adapter."""


@dataclass(frozen=True)
class Adapter:
    """One matrix's adapter, or that of a stack of matrices; parts by canonical names."""

    a: str
    """[rank, in]; of a stack, [experts * rank, in], the experts one after the other."""
    b: str
    """[out, rank]; of a stack, [out, rank * experts], the ranks one after the other."""
    rank: int
    scale: float
    """Of the product."""
    magnitude: str | None = None
    """[out], DoRA's length of each row (Liu et al., arXiv:2402.09353)."""
    experts: int = 0
    """Matrices in the stack; 0 of a single matrix."""
    transposed: bool = False
    """Whether the matrix is [in, out] instead of [out, in], and so are those of a stack."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts, in the order `merged` takes them."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def merged(self, base: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the matrix that the layer computes with, in the dtype of `base`, computed in float32 or better.

        That is W + scale B A; with a magnitude m, each row of it scaled to length m (arXiv:2402.09353, eq. 5).

        Args:
            base: [out, in], or [in, out] if `transposed`, or a stack.
            parts: As in `names`.
        """
        wide = torch.promote_types(torch.promote_types(base.dtype, parts[0].dtype), torch.float32)
        whole, a, b = base.to(wide), parts[0].to(wide), parts[1].to(wide)
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # [E, rank, in]
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # [E, out, rank]
            left, right = (a.mT, b.mT) if self.transposed else (b, a)
            return torch.baddbmm(whole, left, right, alpha=self.scale).to(base.dtype)
        whole = torch.addmm(whole.mT if self.transposed else whole, b, a, alpha=self.scale)
        if self.magnitude is not None:
            whole = whole * (parts[2].to(wide) / lengths(whole))[:, None]
        return (whole.mT.contiguous() if self.transposed else whole).to(base.dtype)


def lengths(matrix: Tensor) -> Tensor:
    """Return [out] lengths of the rows of [out, in]."""
    norms: Tensor = torch.linalg.norm(matrix, dim=1)
    return norms


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapter of each adapted matrix or stack, by its canonical name; empty without adapters."""
    adapters = {}
    for path, layer in layers_of(model):
        stack = hasattr(layer, "parameter_name")
        adapted = canonical_name(f"{path}.{layer.parameter_name if stack else 'weight'}")
        magnitude = canonical_name(f"{path}.lora_magnitude_vector.{ADAPTER_NAME}.weight")
        adapters[adapted] = Adapter(
            canonical_name(f"{path}.lora_A.{ADAPTER_NAME}.weight"),
            canonical_name(f"{path}.lora_B.{ADAPTER_NAME}.weight"),
            int(layer.r[ADAPTER_NAME]),
            float(layer.scaling[ADAPTER_NAME]),
            magnitude if ADAPTER_NAME in layer.lora_magnitude_vector else None,
            int(layer.num_experts) if stack else 0,
            is_transposed(layer.get_base_layer()),
        )
    return adapters


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a product with one matrix, [out, in] as torch's or [in, out] as GPT-2's."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, nn.Linear | Conv1D)


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's matrix is [in, out], or its stack of them [experts, in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D) or bool(getattr(layer, "is_transposed", False))


def has_transposed(model: nn.Module, paths: Sequence[str]) -> bool:
    """Whether the matrix of some of a model's layers is [in, out]."""
    return any(is_transposed(model.get_submodule(path)) for path in paths)


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each of peft's layers."""
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield path, module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as if it had no adapters: the frozen model, bit for bit."""
    layers = [layer for _, layer in layers_of(model)]
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001 - its public form also changes requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001 - as above
