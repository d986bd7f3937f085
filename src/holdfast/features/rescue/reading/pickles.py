"""Pickles of torch files, read by a list of names: nothing that a file asks for is imported or called.

A pickle names functions and classes, and calls them. Here every name of a closed list stands for a function or class of
this file that only notes what it was given; any other name is refused. They are made anew for every file, since a
pickle can set attributes of what it names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.place.memory import no_memory_for
from holdfast.features.rescue.reading.modest_pickles import is_modest
from holdfast.features.rescue.reading.record import DamagedFile
from holdfast.parallel.failure.classify import is_out_of_memory

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
    "Float8_e4m3fnStorage": torch.float8_e4m3fn,
    "Float8_e5m2Storage": torch.float8_e5m2,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}

_DTENSOR = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed._tensor.DTensor",
    }
)
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_OPAQUE_NAMES = frozenset(
    {
        "torch.device",
        "torch.serialization._get_layout",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._tensor.device_mesh.DeviceMesh",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed._tensor.placement_types.DTensorSpec",
        "torch.distributed._tensor.placement_types.TensorMeta",
        "torch.distributed._shard.metadata.ShardMetadata",
        "torch.distributed._shard.sharded_tensor.shard.Shard",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "torch.distributed.remote_device._remote_device",
        "_codecs.encode",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
    }
)
"""Names of objects whose arguments are kept, and which are neither imported nor called."""
_PLACEMENTS = ("torch.distributed.tensor.placement_types.", "torch.distributed._tensor.placement_types.")


@dataclass(frozen=True)
class StoredView:
    """A tensor in a file, described by its storage, offset, shape and strides."""

    storage: str
    dtype: torch.dtype
    count: int
    """Elements of the storage."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """One rank's shard of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    local: StoredView | None
    """The local shard; None where this rank holds nothing."""
    dim: int | None
    """The dimension that is cut; None where every rank has the whole."""
    coordinate: tuple[int, ...]
    """The rank's coordinate on the mesh; empty if the file does not state it."""
    cut_axis: int | None
    """The mesh axis that `dim` is cut over."""
    offsets: tuple[int, ...] | None = None
    """Where the shard begins, if the file says so."""


class OpaqueObject:
    """Replaces an object with a listed name, and keeps the name, the arguments of its call, and its state."""

    name = ""
    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *arguments: Any) -> OpaqueObject:
        """Keep the arguments of the call."""
        instance = super().__new__(cls)
        instance.arguments, instance.fields = arguments, {}
        return instance

    def __setstate__(self, state: Any) -> None:
        """Keep the state of the object that it stands for: a dictionary, or (None, slots)."""
        for values in state if isinstance(state, tuple) else (state,):
            if isinstance(values, dict):
                self.fields |= values
        self.arguments += (state,)


class StateDict(dict[Any, Any]):
    """An OrderedDict of a state, whose attributes (`_metadata`) mean nothing here."""

    def __setstate__(self, _: Any) -> None:
        """Take nothing."""


class _Unpickler(pickle.Unpickler):
    """Resolves the names of a closed list, and refuses every other name."""

    def __init__(self, data: bytes, extra: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._extra = extra
        self._stand_ins: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a listed name.

        Raises:
            DamagedFile: Any other name.
        """
        dotted = f"{module}.{name}"
        if dotted not in self._stand_ins:
            self._stand_ins[dotted] = self._stand_in_for(module, name, dotted)
        return self._stand_ins[dotted]

    def _stand_in_for(self, module: str, name: str, dotted: str) -> Any:
        if dotted in self._extra:
            return self._extra[dotted]
        # What has no storage type of its own, as float8, is saved as bytes by the class where it is defined.
        if (module == "torch" or dotted == "torch.storage.UntypedStorage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        builders = _builders()
        if dotted in builders:
            return builders[dotted]
        if dotted in _OPAQUE_NAMES or dotted in _DTENSOR or dotted == _SHARDED or dotted.startswith(_PLACEMENTS):
            return type(name, (OpaqueObject,), {"name": dotted})
        raise DamagedFile(f"asks for {dotted}, which no such file needs; nothing of it was run")

    def persistent_load(self, saved: Any) -> Any:
        """Return a storage's dtype, key and size.

        Raises:
            DamagedFile: It is none.
        """
        match saved:
            case ("storage", torch.dtype() as dtype, str(key), _, int(count)):
                return (key, dtype, count)
        raise DamagedFile("refers to something that is no storage of a tensor")


def _builders() -> dict[str, Callable[..., Any]]:
    """Return what stands for torch's own functions that make tensors; new ones each time."""

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredView:
        key, dtype, count = storage
        view = StoredView(key, dtype, count, offset, tuple(shape), tuple(strides))
        _check_view(view)
        return view

    def tensor_of_dtype(storage: Any, offset: Any, shape: Any, strides: Any, *extras: Any) -> StoredView:
        # Version 3 is for dtypes without a typed storage: the storage counts bytes, and the dtype is a later argument.
        key, _, count = storage
        dtype = next(value for value in extras if isinstance(value, torch.dtype))
        view = StoredView(key, dtype, count // dtype.itemsize, offset, tuple(shape), tuple(strides))
        _check_view(view)
        return view

    def wrapper(kind: Any, dtype: Any, shape: Any, *_: Any) -> tuple[str, Any, Any]:
        return kind.name, dtype, tuple(shape)

    def from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        rebuilt = function(*arguments)
        name = getattr(kind, "name", None)
        if name in _DTENSOR:
            return _from_dtensor(rebuilt[1], rebuilt[2], state)
        if name == _SHARDED:
            return _from_sharded(rebuilt[1], rebuilt[2], state)
        return rebuilt

    return {
        "collections.OrderedDict": type("StateDict", (StateDict,), {}),
        "collections.defaultdict": lambda *_: StateDict(),
        "torch.Size": tuple,
        # ShardedTensor's state asks for a class by its class: whatever it asks for, it is noted.
        "__builtin__.getattr": lambda *_: type("OpaqueObject", (OpaqueObject,), {}),
        "builtins.getattr": lambda *_: type("OpaqueObject", (OpaqueObject,), {}),
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": tensor_of_dtype,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_wrapper_subclass": wrapper,
        "torch._tensor._rebuild_from_type_v2": from_type,
    }


def _check_view(view: StoredView) -> None:
    numbers = (view.count, view.offset, *view.shape, *view.strides)
    are_counts = all(type(number) is int and number >= 0 for number in numbers)
    if not are_counts or len(view.shape) != len(view.strides) or not isinstance(view.storage, str):
        raise DamagedFile("holds a tensor whose shape is none")
    end = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True)) + 1
    if 0 not in view.shape and end > view.count:
        raise DamagedFile("holds a tensor that goes beyond its storage")


def _from_dtensor(dtype: torch.dtype, shape: tuple[int, ...], state: Any) -> Sharded:
    slots = state[1] if isinstance(state, tuple) else state  # behind the attributes, of which it has none
    # `_spec` and `_local_tensor` are the private slots that DTensor's pickle holds: mesh and placements, and the shard.
    spec, local = slots["_spec"].fields, slots["_local_tensor"]
    mesh = spec["mesh"].fields
    cut = [(axis, placement) for axis, placement in enumerate(spec["placements"]) if placement.name.endswith("Shard")]
    if (
        any(placement.name.rpartition(".")[2] not in {"Shard", "Replicate"} for placement in spec["placements"])
        or len(cut) > 1
    ):
        raise DamagedFile("holds a tensor that is cut over two axes of the mesh (tensor parallel), which is not read")
    axis, dim = (cut[0][0], cut[0][1].fields["dim"]) if cut else (None, None)
    coordinate = mesh.get("_coordinate_on_dim") or ()
    return Sharded(tuple(shape), dtype, local, dim, tuple(coordinate), axis)


def _from_sharded(dtype: torch.dtype, shape: tuple[int, ...], state: Any) -> Sharded:
    shards = state[0] if isinstance(state, tuple) else state
    if not shards:
        return Sharded(shape, dtype, None, 0, (), None)
    if len(shards) > 1:
        raise DamagedFile("holds several parts of one tensor in one file, which is not read")
    shard = shards[0].fields
    offsets = tuple(shard["metadata"].fields["shard_offsets"])
    return Sharded(shape, dtype, shard["tensor"], 0, (), None, offsets)


def unpickled(data: bytes, extra: Mapping[str, Any] | None = None) -> Any:
    """Return what a pickle of a torch file holds.

    Args:
        data: The pickle.
        extra: Further names, with what stands for them.

    Raises:
        DamagedFile: It is damaged, or asks for a name that is not listed.
        CheckpointUnreadable: This machine is short of memory.
    """
    if not is_modest(data):
        raise DamagedFile("asks for more memory or time than goes with its size")
    try:
        return _Unpickler(data, extra or {}).load()
    except DamagedFile:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        if is_out_of_memory(error):
            raise no_memory_for("a file's list of tensors", len(data)) from error
        raise DamagedFile(f"holds a pickle that cannot be read ({type(error).__name__}: {error})") from None
