"""Refuse tensors that a checkpoint cannot hold exactly (subclasses, lazy ones), before any byte is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from holdfast.errors import ModelError
from holdfast.parallel.shards import local_part, odd_class

_EXTRA_STATE = "_extra_state"
_PIECE = 1 << 20
"""Elements widened at once, of dtypes that have no minimum."""


def refuse_odd(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be written and read back exactly.

    Args:
        tensors: Tensors by their names in the checkpoint.

    Raises:
        ModelError: The first such tensor, and what to do.
    """
    for key, tensor in tensors.items():
        oddity = _oddity(tensor)
        if oddity is not None:
            raise ModelError(f"The model cannot be saved: {key.partition('.')[2]} {oddity}")


def _oddity(tensor: Tensor) -> str | None:
    kind = odd_class(tensor)
    if kind is not None:
        return (
            f"is a {kind}, a subclass of torch.Tensor whose parts would be lost. Keep it in a plain tensor, of "
            "whatever dtype."
        )
    local = local_part(tensor.detach())
    if local.is_meta:
        return "is on the meta device and has no numbers. Give the model its weights first."
    if local.is_quantized or local.layout is not torch.strided:
        form = str(local.dtype if local.is_quantized else local.layout).removeprefix("torch.")
        return f"is stored as {form}. Keep its parts as plain tensors, such as indices and values."
    if local.is_conj():
        return "is a lazy conjugate of other memory. Store tensor.resolve_conj()."
    if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        return "is expanded, so that several elements are one number in memory. Store tensor.contiguous()."
    return None


def refuse_lazy(tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers that have no shape yet.

    Raises:
        ModelError: The first such one.
    """
    name = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
    if name is not None:
        raise ModelError(
            f"The model cannot be saved: {name} has no shape yet, being lazy. Call the model once before a save."
        )


def refuse_extra_state(state: Mapping[str, Any]) -> None:
    """Refuse what modules add to their state dict by `get_extra_state`, which is not a tensor with a name.

    Raises:
        ModelError: A module adds something.
    """
    for name, value in state.items():
        if name.rpartition(".")[2] == _EXTRA_STATE and value is not None:
            raise ModelError(
                f"The model cannot be saved: {name} is extra state of a module (get_extra_state), which would be lost. "
                "Keep it in a buffer, or give it to the save as `extra`."
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number of a plain tensor is NaN or infinite."""
    if tensor.is_complex():
        return is_finite(torch.view_as_real(tensor))
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize > 1:
        return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return True  # it has neither
    return all(bool(torch.isfinite(piece.to(torch.float32)).all()) for piece in torch.split(tensor.flatten(), _PIECE))
