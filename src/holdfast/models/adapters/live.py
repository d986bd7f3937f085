"""Find the adapters in a model, merge them into their matrices, and list the modules that are trained without LoRA.

Parameters are held by peft's modules. A matrix keeps the canonical name that it has without an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models.files.conversion import Header
from holdfast.models.files.four_bit import FourBitLinear, four_bit_layers, unpacked
from holdfast.models.names import canonical_name, named_parameters, tied_names

ADAPTER_NAME = "default"
"""Name of our only adapter in peft's modules."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of a matrix or of a stack of matrices; factors are given by canonical name."""

    a: str
    """[rank, in]; of a stack, [experts * rank, in], the experts one after the other."""
    b: str
    """[out, rank]; of a stack, [out, rank * experts], the ranks one after the other."""
    rank: int
    scale: float
    """Factor of the product B A."""
    magnitude: str | None = None
    """[out], DoRA's length of each row (Liu et al., arXiv:2402.09353)."""
    experts: int = 0
    """Matrices in the stack; 0 of a single matrix."""
    transposed: bool = False
    """Whether the matrix is [in, out] instead of [out, in], and so are those of a stack."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, in the order `merged` takes them."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def merged(self, base: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Return the matrix that the layer computes with, in the dtype of `base`, computed in float32 or better.

        That is W + scale B A; with a magnitude m, each row of it scaled to length m (arXiv:2402.09353, eq. 5).

        Args:
            base: [out, in], or [in, out] if `transposed`, or a stack.
            factors: As in `names`.
        """
        wide = torch.promote_types(torch.promote_types(base.dtype, factors[0].dtype), torch.float32)
        matrix, a, b = base.to(wide), factors[0].to(wide), factors[1].to(wide)
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])  # [E, rank, in]
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)  # [E, out, rank]
            left_factor, right_factor = (a.mT, b.mT) if self.transposed else (b, a)
            return torch.baddbmm(matrix, left_factor, right_factor, alpha=self.scale).to(base.dtype)
        matrix = torch.addmm(matrix.mT if self.transposed else matrix, b, a, alpha=self.scale)
        if self.magnitude is not None:
            matrix = matrix * (factors[2].to(wide) / lengths(matrix))[:, None]
        return (matrix.mT.contiguous() if self.transposed else matrix).to(base.dtype)


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

    # PhiMoE's router is a subclass whose forward pass returns its choice too; peft would add a matrix to the three.
    return isinstance(layer, nn.Linear | Conv1D) and type(layer).forward in {nn.Linear.forward, Conv1D.forward}


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer's matrix is [in, out], or its stack of them [experts, in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D) or bool(getattr(layer, "is_transposed", False))


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
        # peft reads this attribute in each forward pass.
        layer._disable_adapters = True  # noqa: SLF001 - its public form also changes requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001 - as above


def whole_modules(model: nn.Module) -> dict[str, list[str]] | None:
    """Return the modules that are trained whole in a model with adapters, each with the names of its parameters.

    Returns:
        Canonical names; None where peft's files could not hold what is trained: part of a module only, such as the bias
        of a layer whose matrix is frozen, a module with a stored buffer, which is none of our weights to export, or one
        that is tied to another, which peft would part.
    """
    trained = _trained_whole(model)
    modules = _outermost({name.rpartition(".")[0] for name in trained})
    parameters_of = {path: _below(path, named_parameters(model)) for path in modules}
    covered = {name for names in parameters_of.values() for name in names}
    tied = [name for first, duplicates in tied_names(model).items() for name in (first, *duplicates)]
    apart = any(_below(path, (*tied, *_stored_buffers(model))) for path in modules)
    return None if covered != trained or apart else parameters_of


def _trained_whole(model: nn.Module) -> set[str]:
    adapters = {name for adapter in adapters_of(model).values() for name in adapter.names}
    return {name for name, value in named_parameters(model).items() if value.requires_grad} - adapters


def _outermost(paths: set[str]) -> list[str]:
    return sorted(path for path in paths if not any(path.startswith(f"{parent}.") for parent in paths))


def _below(path: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{path}.")]


def _stored_buffers(model: nn.Module) -> list[str]:
    return [
        canonical_name(f"{path}.{name}")
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


@dataclass(frozen=True)
class Join:
    """How a matrix, or a stack of them, is computed from several parameters: unpacked from 4 bits, LoRA merged."""

    inputs: tuple[str, ...]
    """Canonical names of its parameters; first the matrix as it is stored."""
    run: Callable[[Sequence[Tensor]], Tensor]
    """(the whole `inputs`, in their order) -> the matrix"""
    header: Header | None
    """Header of the matrix, where it is stored in another shape."""


def joins_of(model: nn.Module, *, merge: bool = True) -> dict[str, Join]:
    """Return the matrices of a model that are more than one parameter, or another one, by canonical name.

    Args:
        model: With adapters or without.
        merge: Whether matrices include their adapters; otherwise they are the frozen ones.
    """
    adapters, layers = adapters_of(model) if merge else {}, dict(four_bit_layers(model))
    return {name: _join(name, adapters.get(name), layers.get(name)) for name in {**layers, **adapters}}


def _join(name: str, adapter: Adapter | None, layer: FourBitLinear | None) -> Join:
    def run(tensors: Sequence[Tensor]) -> Tensor:
        base = tensors[0]
        if layer is not None:
            wide = torch.promote_types(layer.written_dtype, torch.float32)
            base = unpacked(base, layer.in_features, layer.kind, wide)
        matrix = base if adapter is None else adapter.merged(base, tensors[1:])
        return matrix if layer is None else matrix.to(layer.written_dtype)

    header = None if layer is None else Header((layer.out_features, layer.in_features), layer.written_dtype)
    return Join((name, *(() if adapter is None else adapter.names)), run, header)
