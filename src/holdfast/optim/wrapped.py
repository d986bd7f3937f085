"""Decompose quantised optimizer state of torchao's three classes into plain tensors, and reconstruct it.

A quantised tensor consists of inner tensors, such as codes, scales and tables. Each is stored as a plain tensor in its
own dtype, in one of two layouts:

    by rows     one stored row belongs to `every` rows of the quantised tensor: codes, and scales of complete blocks
    by shard    one stored row per shard: tables of values

Each inner tensor is thus sharded like the quantised tensor, and can be resharded wherever blocks end. A checkpoint
contains the names of classes; only those in LISTED are imported.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from holdfast.config.quiet import broken
from holdfast.errors import ConfigError, HoldfastError
from holdfast.optim.tagged_json import decode, encode
from holdfast.parallel.shards import odd_class

BETWEEN = "/"
"""Separates a state key and the name of an inner tensor, as in optim.<parameter>.exp_avg/codes."""

LISTED: Mapping[str, frozenset[str]] = {
    "torchao.optim.subclass_8bit.OptimState8bit": frozenset({"qmap"}),
    "torchao.optim.subclass_4bit.OptimState4bit": frozenset({"qmap"}),
    "torchao.optim.subclass_fp8.OptimStateFp8": frozenset(),
}
"""Supported classes of quantised state, each with the names of its inner tensors that are stored by shard."""

_SHAPE = "shape of the shard"


class NotSeparable(HoldfastError):  # noqa: N818 - the name says what is wrong
    """A tensor's class is not in LISTED, or its inner tensors cannot be sharded as it is."""


class InnerTensor(NamedTuple):
    """The stored layout of one inner tensor."""

    every: int
    """Rows of the quantised tensor to which one stored row belongs; 0 if it is stored by shard."""
    split: int = 1
    """Rows of the inner tensor that form one stored row; if above 1, they become its second dimension."""

    def stored(self, inner: Tensor) -> Tensor:
        """Reshape an inner tensor to its stored layout."""
        if not self.every:
            return inner.unsqueeze(0)
        return inner if self.split == 1 else inner.reshape(-1, self.split, *inner.shape[1:])

    def inner(self, stored: Tensor) -> Tensor:
        """Reshape one shard's stored rows back to the inner tensor."""
        if not self.every:
            return stored[0]
        return stored if self.split == 1 else stored.reshape(-1, *stored.shape[2:])


@dataclass(frozen=True)
class Wrapped:
    """The class, shape and settings of a quantised tensor, without its inner tensors; the same on every rank."""

    kind: str
    """Qualified name of its class, one of LISTED."""
    context: Sequence[Any]
    """The context of `__tensor_flatten__` as tagged JSON, with a placeholder for the shard's shape."""
    shape: tuple[int, ...]
    """Unsharded shape."""
    dtype: str
    """The dtype that the quantised tensor reports, not that of its codes."""
    shards: int
    """Number of shards it was divided into."""
    parts: Mapping[str, InnerTensor]

    def as_plain(self) -> dict[str, Any]:
        """Return the record as values that JSON can hold."""
        return {
            "class": self.kind,
            "context": self.context,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "shards": self.shards,
            "parts": {name: list(inner) for name, inner in self.parts.items()},
        }

    def rows_per_shard(self, shards: int) -> int:
        """Return the rows of the first shards; the last ones may have fewer."""
        return -(-self.shape[0] // shards) if self.shape else 1

    def shape_of(self, shard: int, shards: int) -> tuple[int, ...]:
        """Return the shape of one shard."""
        if shards == 1:
            return self.shape
        rows = self.rows_per_shard(shards)
        return (max(0, min(rows, self.shape[0] - shard * rows)), *self.shape[1:])

    def why_not_cut(self, shards: int) -> str | None:
        """Explain why so many shards would divide a block or leave a rank without rows; None if they would not."""
        rows = self.rows_per_shard(shards)
        if shards == 1:
            return None
        if not self.shape or rows * (shards - 1) >= self.shape[0]:
            return f"{shards} shards leave a rank without rows of it"
        cut = max((inner.every for inner in self.parts.values() if inner.every and rows % inner.every), default=0)
        return f"shards of {rows} rows cut its blocks, which are {cut} rows each" if cut else None

    def put_together(self, tensors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Reconstruct the quantised tensor of one shard from its stored inner tensors.

        Raises:
            NotSeparable: Its class does not accept them.
            ConfigError: torchao is not installed, or too old.
        """
        module, _, name = self.kind.rpartition(".")
        made_by: Any = getattr(torchao_module(module, f"state of class {self.kind}"), name)
        inner = {key: how.inner(tensors[key]) for key, how in self.parts.items()}
        context = [torch.Size(shape) if _is_shape(item) else decode(item) for item in self.context]
        try:
            tensor: Tensor = made_by.__tensor_unflatten__(inner, context, torch.Size(shape), None)
        except Exception as error:  # another version of the class may raise anything
            raise NotSeparable(f"{self.kind} cannot be made again: {type(error).__name__}: {error}") from error
        return tensor


def from_plain(plain: Mapping[str, Any]) -> Wrapped:
    """Return the record that `as_plain` has written."""
    inner_tensors = {str(name): InnerTensor(int(every), int(split)) for name, (every, split) in plain["parts"].items()}
    shape = tuple(int(side) for side in plain["shape"])
    return Wrapped(
        plain["class"], list(plain["context"]), shape, str(plain["dtype"]), int(plain["shards"]), inner_tensors
    )


def torchao_module(name: str, subject: str) -> Any:
    """Import a module of torchao.

    Raises:
        ConfigError: torchao is not installed, too old, or cannot be imported.
    """
    # On import it tells of kernels for GPUs that are not here, and of forms that Python and torch would have otherwise.
    logs = [logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.ERROR)
        if reason := broken("torchao"):
            raise ConfigError(f"{subject} needs torchao: {reason}. Install it: pip install -U 'holdfast[lowbit]'.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{subject} needs torchao: pip install 'holdfast[lowbit]' ({error}).") from error
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def take_apart(value: Tensor) -> tuple[Wrapped, dict[str, Tensor]]:
    """Return a record of a tensor's class and its inner tensors as they are stored; they share its memory.

    Raises:
        NotSeparable: Its class is not listed, or its blocks do not end where shards do.
    """
    # `to_local` may return a new tensor object, and the inner tensors must be those that the optimizer updates in
    # place.
    local: Any = value._local_tensor if isinstance(value, DTensor) else value
    kind = odd_class(value) or ""
    if kind not in LISTED:
        raise NotSeparable("a subclass of torch.Tensor that is none of torchao's optimizer states")
    names, context = local.__tensor_flatten__()
    shards = shards_of(value)
    inner_tensors = {name: _part(getattr(local, name), local, fixed=name in LISTED[kind]) for name in names}
    opened = [{_SHAPE: "size"} if isinstance(item, tuple | list) else encode(item) for item in context]
    record = Wrapped(kind, opened, tuple(value.shape), str(value.dtype).removeprefix("torch."), shards, inner_tensors)
    return record, {
        name: _placed(name, inner, inner.stored(getattr(local, name)), value, shards)
        for name, inner in inner_tensors.items()
    }


def shards_of(value: Tensor) -> int:
    """Return the number of shards of a tensor's rows.

    Raises:
        NotSeparable: It is sharded in another way than by rows.
    """
    if not isinstance(value, DTensor):
        return 1
    shards = 1
    for axis, placement in enumerate(value.placements):
        size = value.device_mesh.size(axis)
        if type(placement) is Shard and placement.dim == 0 and shards == 1:
            shards = size
        elif not isinstance(placement, Replicate) and size > 1:
            raise NotSeparable(f"sharded as {value.placements}, where its parts cannot follow")
    return shards


def placed_like(like: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """Wrap a local tensor as the shard of a DTensor of the given shape, sharded like `like`; no data is moved."""
    if not isinstance(like, DTensor):
        return local
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    # `DTensor.from_local` would call `view_as` on the local tensor, which a quantised class need not implement.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _part(inner: Tensor, local: Tensor, *, fixed: bool) -> InnerTensor:
    """Choose the stored layout of an inner tensor."""
    rows = local.shape[0] if local.ndim else 0
    if fixed or not rows or not inner.numel():
        return InnerTensor(0)
    common = math.gcd(rows, inner.shape[0])
    return InnerTensor(rows // common, inner.shape[0] // common)


def _placed(name: str, inner: InnerTensor, stored: Tensor, value: Tensor, shards: int) -> Tensor:
    """Return a stored inner tensor as a DTensor of which this rank holds its rows."""
    if not inner.every:
        return placed_like(value, stored, (shards, *stored.shape[1:]))
    blocks = value.shape[0] // inner.every
    rows = -(-blocks // shards)
    own_rows = stored.shape[0]
    if (
        value.shape[0] % inner.every
        or own_rows > rows
        or (own_rows < rows and own_rows != blocks - (shards - 1) * rows)
    ):
        raise NotSeparable(f"sharded so that blocks of its {name} do not end where shards do")
    return placed_like(value, stored, (blocks, *stored.shape[1:]))


def _is_shape(item: Any) -> bool:
    """Return whether an item of a context is the placeholder for the shard's shape, which may differ between ranks."""
    return isinstance(item, dict) and _SHAPE in item
