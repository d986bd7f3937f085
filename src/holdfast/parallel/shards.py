"""The local shards of a model: materialise them from the meta device, one tensor at a time, and find them again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from holdfast.errors import ModelError
from holdfast.models.files.loading import WeightSource
from holdfast.models.names import canonical_name, tied_names
from holdfast.parallel.copies import copies_of
from holdfast.parallel.plan import ShardPlan


def local_rows(tensor: Tensor) -> slice:
    """Return which rows of dimension 0 this rank holds; all of them for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0] if tensor.ndim else 0)
    shards = [(axis, placement) for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    if not shards:
        return slice(0, tensor.shape[0])
    ((axis, placement),) = shards
    assert placement.dim == 0, "units are sharded by rows"
    ranks = tensor.device_mesh.size(axis)
    # FSDP2 splits like `torch.chunk`: all shards have ceil(rows / ranks) rows but the last ones, which may be
    # shorter or empty.
    rows_per_rank = -(-tensor.shape[0] // ranks)
    start = min(tensor.device_mesh.get_local_rank(axis) * rows_per_rank, tensor.shape[0])
    rows = tensor.to_local().shape[0]
    return slice(start, start + rows)


def local_part(tensor: Tensor) -> Tensor:
    """Return the memory this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def odd_class(tensor: Tensor) -> str | None:
    """Return the class name of a tensor, or of a DTensor's local shard, if it is a tensor subclass; else None.

    Quantised tensors are subclasses: what looks like float32 consists of integers and scales, which a copy of the
    values does not keep. The FakeTensors of `holdfast plan` count as plain tensors.
    """
    # `to_local` passes through autograd and returns a new object; the class that is stored is wanted.
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    return None if kind in {Tensor, nn.Parameter, FakeTensor} else f"{kind.__module__}.{kind.__qualname__}"


@torch.no_grad()
def materialise(
    policy: nn.Module,
    source: WeightSource,
    buffers: Mapping[str, Tensor],
    device: torch.device,
    *,
    offload: bool = False,
) -> None:
    """Allocate a sharded model's tensors and load its weights; each rank reads only its own rows.

    Args:
        policy: The sharded model, on the meta device.
        source: Reads parameters and persistent buffers.
        buffers: Every buffer as computed on the CPU, by name.
        device: The compute device.
        offload: Keep parameters in host memory.

    Raises:
        ModelError: A parameter was not given, or a buffer differs from its reference.
    """
    ties = tied_names(policy)
    tensors, filled = place_empty(policy, buffers, device, offload=offload)
    for group in source.groups():
        rows = {name: local_rows(tensors[name]) for name in group.targets if name in tensors}
        for name, tensor in group.load(rows).items():
            local_part(tensors[name]).copy_(tensor)
            filled.add(name)
    _refuse_missing(set(tensors), filled, ties)
    check_buffers(policy, buffers)


@torch.no_grad()
def place_empty(
    policy: nn.Module, buffers: Mapping[str, Tensor], device: torch.device, *, offload: bool = False
) -> tuple[dict[str, Tensor], set[str]]:
    """Allocate a sharded model's tensors without loading weights, and fill its buffers; arguments as in `materialise`.

    Returns:
        All tensors by name, and the names of the buffers, which are filled.

    Raises:
        ModelError: Tied parameters came apart.
    """
    ties = tied_names(policy)
    _leave_meta(policy, device, offload)
    if tied_names(policy) != ties:
        raise ModelError(f"Tied parameters came apart while the model was placed: {sorted(ties)}.")
    tensors = _tensors_by_name(policy)
    reference = {name: value for name, value in buffers.items() if name in tensors}
    for name, value in reference.items():
        tensors[name].copy_(value)
    return tensors, set(reference)


def _refuse_missing(required: set[str], filled: set[str], ties: Mapping[str, tuple[str, ...]]) -> None:
    for first, aliases in ties.items():
        names = {first, *aliases}
        if names & filled:
            filled = filled | names
    missing = sorted(required - filled)
    if missing:
        raise ModelError(f"No tensor was given for {', '.join(missing[:4])} ({len(missing)} in all).")


def _leave_meta(policy: nn.Module, device: torch.device, offload: bool) -> None:
    aliases = _aliases(policy)
    # The memory is uninitialised. Whatever no file holds (rotary frequencies, scales) must be filled, or it is
    # garbage that trains without an error.
    policy.to_empty(device=torch.device("cpu") if offload else device)
    if offload:
        _move_buffers(policy, device)
    for path, first in aliases.items():  # modules that are not sharded lose their ties when they leave meta
        owner, _, name = path.rpartition(".")
        policy.get_submodule(owner).register_parameter(name, policy.get_parameter(first))


def _aliases(policy: nn.Module) -> dict[str, str]:
    """Return, for every further name of a tied parameter, the path of its first."""
    firsts: dict[int, str] = {}
    aliases = {}
    for path, parameter in policy.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), path)
        if first != path:
            aliases[path] = first
    return aliases


def _tensors_by_name(policy: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        tensors[canonical_name(name)] = parameter.data if not isinstance(parameter.data, DTensor) else parameter
    for name, buffer in policy.named_buffers():
        tensors[canonical_name(name)] = buffer
    return tensors


def _move_buffers(policy: nn.Module, device: torch.device) -> None:
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # `_non_persistent_buffers_set` is the only record of which buffers state_dict leaves out;
            # registering again with the default would put rotary frequencies into every checkpoint.
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)


def check_buffers(policy: nn.Module, reference: Mapping[str, Tensor]) -> None:
    """Compare the buffers that no checkpoint holds with their CPU reference.

    Raises:
        ModelError: A buffer differs from its reference, or was cast.
    """
    stored = {canonical_name(name) for name in policy.state_dict()}
    for name, buffer in policy.named_buffers():
        path = canonical_name(name)
        if path in stored or path not in reference:
            continue
        expected = reference[path]
        if buffer.dtype != expected.dtype or not torch.equal(buffer.cpu(), expected):
            raise ModelError(
                f"The buffer {path} ({buffer.dtype}) differs from what the model's code computes ({expected.dtype}). "
                "Nothing may cast or move it: rotary frequencies in bfloat16 turn every position."
            )


def sharded_parameters(policy: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by canonical name, each as its shard (a DTensor), after freeing gathered units.

    After an evaluation some units are still gathered: `module.weight` is then a temporary copy. Writes to it are lost
    when it is freed, and arithmetic between it and DTensors raises. Hence every reader of parameters calls this. So it
    is with the copies that the passes of a single rank read.
    """
    if (copies := copies_of(policy)) is not None:
        copies.leave()
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {canonical_name(name): parameter for name, parameter in policy.named_parameters()}


def free_copies(policy: nn.Module) -> None:
    """Free the memory of the copies that a single rank's passes read, where there are some, until the next pass."""
    if (copies := copies_of(policy)) is not None:
        copies.free()


def set_last_micro_batch(policy: nn.Module, plan: ShardPlan, *, last: bool, first: bool = True) -> None:
    """Declare which micro-batch of an update the next passes are about.

    Args:
        policy: The root.
        plan: How it is sharded.
        last: The backward pass is the last one, in which postponed gradients are reduced.
        first: The forward pass may find other weights than the one before it did.
    """
    if not first and (copies := copies_of(policy)) is not None:
        copies.keep()
    if plan.reduce_last_only and plan.sharded:
        assert isinstance(policy, FSDPModule)
        policy.set_requires_gradient_sync(last)
