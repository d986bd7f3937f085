"""Whether a tensor holds a NaN or an infinity."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 20
"""Elements widened at once, of dtypes that have no minimum."""


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
