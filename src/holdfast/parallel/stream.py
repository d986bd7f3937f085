"""Whole tensors of a sharded model, one group at a time; exports and engines read the model through here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.models.conversion import Conversion, Header
from holdfast.models.names import canonical_name
from holdfast.parallel.materialise import sharded_parameters


def held_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return what a model directory would hold, as shards: parameters (one name of each tie) and stored buffers."""
    held: dict[str, Tensor] = dict(sharded_parameters(policy))
    stored = {canonical_name(name) for name in policy.state_dict()}
    for name, buffer in policy.named_buffers():
        if canonical_name(name) in stored:
            held[canonical_name(name)] = buffer
    return held


def headers_of(held: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Header]:
    """Return their shapes, with floating-point dtypes replaced by `dtype` if given."""
    return {
        name: Header(tuple(tensor.shape), dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in held.items()
    }


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor; every rank calls this for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def live_tensors(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by canonical name, gathered one at a time; every rank walks through all of them.

    A tensor that is not sharded is the policy's own.
    """
    for name, tensor in held_tensors(policy).items():
        yield name, full_tensor(tensor)


def converted_tensors(
    held: Mapping[str, Tensor], conversions: Sequence[Conversion], dtype: torch.dtype | None, *, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names of the model's directory, gathering one group at a time.

    Args:
        held: From `held_tensors`.
        conversions: From `plan_outgoing`, on their headers.
        dtype: Cast floating-point tensors to this.
        keep: Whether this rank wants the tensors; others take part in gathering and yield nothing.
    """
    for conversion in conversions:
        gathered = {name: full_tensor(held[name]) for name in conversion.sources}
        if not keep:
            continue
        if dtype is not None:
            gathered = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in gathered.items()
            }
        converted = conversion.run(gathered)
        del gathered
        yield from converted.items()
