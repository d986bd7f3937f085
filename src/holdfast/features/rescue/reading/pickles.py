"""Pickles of torch files, read by torch's `weights_only` unpickler under a closed list of names.

Every name that is not torch's way to make a tensor without memory stands for a class of this file, which records what
it is given: neither numpy, nor a mesh, nor a process group is touched, whichever version of torch wrote them. Storages
are on the meta device and keep their names, so that a pickle takes no memory for numbers.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler

from holdfast.checkpoint.place.memory import no_memory_for
from holdfast.features.rescue.reading.modest_pickles import Immodest, names_in
from holdfast.features.rescue.reading.record import DamagedFile
from holdfast.parallel.failure.classify import is_out_of_memory

_PLACEMENTS = ("torch.distributed.tensor.placement_types.", "torch.distributed._tensor.placement_types.")
_RECORDED = (
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.device_mesh.DeviceMesh",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    "torch.distributed._tensor.placement_types.TensorMeta",
    *(
        module + name
        for module in _PLACEMENTS
        for name in ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard", "MaskPartial", "_MaskPartial")
    ),
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
)
"""Names of objects whose arguments and state are recorded."""
_TORCH = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "_codecs.encode",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in dir(torch) if name.endswith("Storage")),
        *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)
"""Names that torch's unpickler knows by itself; of the others that it knows, some take memory."""


class Recorded:
    """An object of a listed name: its arguments, and the attributes of its state."""

    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Recorded:
        """Keep the arguments of the call."""
        instance = super().__new__(cls)
        instance.arguments, instance.fields = arguments, {}
        return instance

    def __setstate__(self, state: Any) -> None:
        """Keep the state: a dictionary, or (None, slots)."""
        for values in state if isinstance(state, tuple) else (state,):
            if isinstance(values, dict):
                self.fields |= values


class Sharded(Tensor):
    """One rank's shard of a tensor; shape and dtype are those of the whole tensor, which has no memory."""

    local: Tensor | None
    """The local shard; None where this rank holds nothing."""
    cut_dim: int | None
    """The dimension that is cut; None where every rank has the whole."""
    coordinate: tuple[int, ...] = ()
    """The rank's coordinate on the mesh; empty if the file does not state it."""
    cut_axis: int | None = None
    """The mesh axis that `cut_dim` is cut over."""
    offsets: tuple[int, ...] | None = None
    """Where the shard begins, if the file says so."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse every operation: torch asks for this method of a tensor without numbers."""
        raise NotImplementedError(func)


class _DTensor(Sharded):
    def __setstate__(self, state: Any) -> None:
        """Take the local tensor, the placements, and the coordinate that the mesh recorded."""
        slots = state[1] if isinstance(state, tuple) else state  # behind the attributes, of which it has none
        spec, self.local = slots["_spec"].fields, slots["_local_tensor"]
        kinds = [type(placement).__name__ for placement in spec["placements"]]
        cut = [axis for axis, kind in enumerate(kinds) if kind.endswith("Shard")]
        if not set(kinds) <= {"Shard", "Replicate"} or len(cut) > 1:
            raise DamagedFile(
                "holds a tensor that is cut over two axes of the mesh (tensor parallel), which is not read"
            )
        self.cut_axis = cut[0] if cut else None
        self.cut_dim = spec["placements"][cut[0]].fields["dim"] if cut else None
        self.coordinate = tuple(spec["mesh"].fields.get("_coordinate_on_dim") or ())


class _ShardedTensor(Sharded):
    def __setstate__(self, state: Any) -> None:
        """Take the local shard and where it begins."""
        shards = state[0] if isinstance(state, tuple) else state
        if len(shards) > 1:
            raise DamagedFile("holds several parts of one tensor in one file, which is not read")
        self.local, self.cut_dim = None, 0
        for shard in shards:
            self.local = shard.fields["tensor"]
            self.offsets = tuple(shard.fields["metadata"].fields["shard_offsets"])


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


def _inner_class(*_: Any) -> type[Recorded]:
    """Return what stands for a class inside of a class, as ShardedTensor's state asks for its memory format."""
    return Recorded


_OURS: dict[str, Any] = {
    **{name: type(name.rpartition(".")[2], (Recorded,), {}) for name in _RECORDED},
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Recorded,
    "builtins.getattr": _inner_class,
    "collections.defaultdict": _dictionary,
    "torch.distributed.tensor.DTensor": _DTensor,
    "torch.distributed.tensor._api.DTensor": _DTensor,
    "torch.distributed._tensor.api.DTensor": _DTensor,
    "torch.distributed._tensor.DTensor": _DTensor,
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": _ShardedTensor,
}


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor that its file holds whole."""
    return isinstance(value, Tensor) and not isinstance(value, Sharded)


def storage_of(tensor: Tensor) -> str:
    """Return the name of the storage that a tensor's numbers lie in.

    Raises:
        DamagedFile: It has none.
    """
    name = getattr(tensor.untyped_storage(), "name", None)
    if not isinstance(name, str):
        raise DamagedFile("holds a tensor without numbers")
    return name


def place_in_file(tensor: Tensor) -> tuple[str, int, torch.Size]:
    """Return what tensors share that are one: storage, offset and shape."""
    return storage_of(tensor), int(tensor.storage_offset()), tensor.shape


_names_of_process = threading.Lock()
"""Held while the names that torch's unpickler knows in the whole process are those of this file."""


@contextmanager
def _ours_alone() -> Iterator[None]:
    """Let the unpickler know the names of this file, and none that a library has added for the whole process."""
    with _names_of_process:
        others = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            with torch.serialization.safe_globals([(kind, name) for name, kind in _OURS.items()]):
                yield
        finally:
            torch.serialization.add_safe_globals(others)  # those that were there


def _storage(saved: Any) -> torch.TypedStorage:
    """Return a storage on the meta device which keeps the name of its member in the file.

    Raises:
        DamagedFile: It is none.
    """
    match saved:
        case ("storage", kind, str(name), _, int(count)) if 0 <= count < 2**60:
            dtype: torch.dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            storage: Any = torch.UntypedStorage(count * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
            storage.name = name
            return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    raise DamagedFile("refers to something that is no storage of a tensor")


def _refuse_strange(names: frozenset[str]) -> None:
    for name in sorted(names - _TORCH):
        if name.replace("__builtin__", "builtins") not in _OURS:
            raise DamagedFile(f"asks for {name}, which no such file needs; nothing of it was run")


def unpickled(data: bytes) -> Any:
    """Return what a pickle of a torch file holds: tensors on the meta device, and `Sharded`.

    Raises:
        DamagedFile: It is damaged, or asks for a name that is not listed.
        CheckpointUnreadable: This machine is short of memory.
    """
    if not data.startswith(b"\x80\x02"):
        protocol = str(data[1]) if data[:1] == b"\x80" and len(data) > 1 else "0 or 1"
        raise DamagedFile(f"holds a pickle of protocol {protocol}, where torch.save writes protocol 2")
    try:
        _refuse_strange(names_in(data))
        unpickler: Any = Unpickler(io.BytesIO(data), encoding="utf-8")
        unpickler.persistent_load = _storage
        with _ours_alone():
            return unpickler.load()
    except DamagedFile:
        raise
    except Immodest as error:
        raise DamagedFile(str(error)) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        if is_out_of_memory(error):
            raise no_memory_for("a file's list of tensors", len(data)) from error
        raise DamagedFile(f"holds a pickle that cannot be read ({type(error).__name__}: {error})") from None
