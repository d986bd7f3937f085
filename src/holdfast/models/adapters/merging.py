"""Matrices that exist only once their parts are joined: with an adapter, or out of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.models.adapters.live import Adapter, adapters_of
from holdfast.models.weights.conversion import Header
from holdfast.models.weights.four_bit import FourBitLinear, four_bit_layers, unpacked


@dataclass(frozen=True)
class Join:
    """How one matrix, or stack of them, comes out of a model's parameters."""

    parts: tuple[str, ...]
    """Canonical names; first the matrix as it is stored."""
    run: Callable[[Sequence[Tensor]], Tensor]
    """Whole parts in that order -> the matrix."""
    header: Header | None
    """Of the matrix, where it is stored in another shape."""


def joins_of(model: nn.Module) -> dict[str, Join]:
    """Return the matrices of a model that are more than one parameter, or another one, by canonical name."""
    adapters, layers = adapters_of(model), dict(four_bit_layers(model))
    return {name: _join(name, adapters.get(name), layers.get(name)) for name in {**layers, **adapters}}


def _join(name: str, adapter: Adapter | None, layer: FourBitLinear | None) -> Join:
    def run(parts: Sequence[Tensor]) -> Tensor:
        base = parts[0]
        if layer is not None:
            wide = torch.promote_types(layer.written_dtype, torch.float32)
            base = unpacked(base, layer.in_features, layer.kind, wide)
        whole = base if adapter is None else adapter.merged(base, parts[1:])
        return whole if layer is None else whole.to(layer.written_dtype)

    header = None if layer is None else Header((layer.out_features, layer.in_features), layer.written_dtype)
    return Join((name, *(() if adapter is None else adapter.names)), run, header)
