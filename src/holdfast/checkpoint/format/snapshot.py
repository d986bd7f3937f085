"""One rank's contribution to a checkpoint: its live tensors, or copies of them for a save in the background."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from holdfast.checkpoint.format.unsupported_tensors import refuse_extra_state, refuse_lazy, refuse_odd
from holdfast.models.names import canonical_name, tied_names
from holdfast.optim.state import OptimizerState, collect
from holdfast.parallel.shards import local_part, sharded_parameters

MODEL, OPTIM, AVERAGE = "model.", "optim.", "ema."
TRAINED = "trained parameters"
"""Entry in `contents` of a checkpoint that holds only the trained parameters of its model."""
OWN_CONTENTS = frozenset({"model", TRAINED, "averages", "optimizer", "trainer", "rank"})
"""Entries of `contents` that are not names of companions."""

Outline = dict[str, tuple[tuple[int, ...], str, bool]]
"""Shape, dtype and trained flag of each tensor by name."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint."""

    tensors: Mapping[str, Tensor]
    """Tensors by their stored names."""
    trained: frozenset[str]
    """Names of parameters with gradients."""
    ties: Mapping[str, tuple[str, ...]]
    optimizer: OptimizerState | None
    rank_state: Mapping[str, Any]
    """JSON values of this rank."""
    shared: Mapping[str, Any]
    """JSON values that are equal on all ranks."""
    assets: Mapping[str, bytes] = field(default_factory=dict)
    """Further files by name, of which rank 0's are written."""
    contents: tuple[str, ...] = ("model",)
    companions: Mapping[str, OptimizerState] = field(default_factory=dict)
    """Optimizer states of companions by name; their tensors are in `tensors` (`checkpoint/loading/parts.py`)."""
    coordinate: Mapping[str, int] = field(default_factory=dict)
    """This rank's mesh coordinate by axis; empty without a mesh."""
    readers: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Functions that read each tensor when it is written; the entries of `tensors` are then meta tensors."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters (one name of each tie) and stored buffers under their stored names."""
    return tensors_of(hold(model))


def tensors_of(model_parts: LiveTensors) -> dict[str, Tensor]:
    """Return the tensors of a model's parts under their stored names."""
    # Detached and not `.data`: autograd counts writes to them as writes to the parameters, which engines look at.
    parameters = {MODEL + name: parameter.detach() for name, parameter in model_parts.parameters.items()}
    tensors: dict[str, Tensor] = parameters | {MODEL + name: buffer for name, buffer in model_parts.buffers.items()}
    return tensors | {AVERAGE + name: average for name, average in model_parts.averages.items()}


def optimizer_tensors(state: OptimizerState) -> dict[str, Tensor]:
    """Return optimizer tensors under their stored names."""
    return {f"{OPTIM}{name}.{key}": tensor for name, keys in state.tensors.items() for key, tensor in keys.items()}


@dataclass(frozen=True)
class LiveTensors:
    """References to a model's sharded tensors. They stay valid, since FSDP2 never moves the memory of shards."""

    parameters: Mapping[str, nn.Parameter]
    """One name of each tie."""
    buffers: Mapping[str, Tensor]
    """The stored ones."""
    ties: Mapping[str, tuple[str, ...]]
    has_frozen: bool = True
    """Whether parameters that are not trained are among them."""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    """Of trained parameters, where a run keeps some."""
    coordinate: Mapping[str, int] = field(default_factory=dict)
    """This rank's place on the mesh."""


def hold(
    model: nn.Module,
    *,
    frozen: bool = True,
    averages: Mapping[str, Tensor] | None = None,
    later: Collection[str] = (),
) -> LiveTensors:
    """Return references to a model's tensors, after resharding modules that are gathered.

    Args:
        model: The model, sharded by FSDP2 or plain.
        frozen: Whether to include parameters that are not trained.
        averages: Averages of trained parameters, to be saved as well.
        later: Frozen parameters that count as trained ones.
    """
    state = model.state_dict()
    refuse_extra_state(state)
    stored = {canonical_name(name) for name in state}
    buffers = {canonical_name(name): buffer for name, buffer in model.named_buffers()}
    parameters = sharded_parameters(model)
    refuse_lazy({**parameters, **buffers})
    selected = {name: value for name, value in parameters.items() if frozen or value.requires_grad or name in later}
    return LiveTensors(
        selected,
        {name: buffer for name, buffer in buffers.items() if name in stored},
        {name: aliases for name, aliases in tied_names(model).items() if name in selected},
        frozen,
        averages or {},
        coordinate_of(model),
    )


def take(
    model: nn.Module | LiveTensors,
    optimizer: Optimizer | OptimizerState | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    assets: Mapping[str, bytes] | None = None,
    random_then: RandomState | None = None,
) -> Snapshot:
    """Take a snapshot of a model and an optimizer, which references their tensors and copies nothing.

    Args:
        model: The model, sharded by FSDP2 or plain; or the result of `hold`, so that no module is touched.
        optimizer: The optimizer; or a state to write in its place, as in a rehearsal.
        shared: JSON values that are equal on all ranks.
        rank_state: JSON values of this rank; its random state is added.
        assets: Further files by name.
        random_then: Random state of this rank to save; default: the present one.

    Raises:
        UnsavableOptimizer: The optimizer holds a value of a type that cannot be written.
        ModelError: A tensor of the model is a subclass that holds more than its values.
    """
    model_parts = model if isinstance(model, LiveTensors) else hold(model)
    parameters = model_parts.parameters
    state = collect(optimizer, parameters) if isinstance(optimizer, Optimizer) else optimizer
    tensors = tensors_of(model_parts)
    refuse_odd(tensors)
    if state is not None:
        tensors |= optimizer_tensors(state)
    return Snapshot(
        tensors=tensors,
        trained=frozenset(MODEL + name for name, parameter in parameters.items() if parameter.requires_grad),
        ties=model_parts.ties,
        optimizer=state,
        rank_state={"random": random_state_as_json(random_then or random_state()), **(rank_state or {})},
        shared=dict(shared or {}),
        assets=dict(assets or {}),
        contents=(
            "model" if model_parts.has_frozen else TRAINED,
            *(("averages",) if model_parts.averages else ()),
            *(("optimizer",) if state is not None else ()),
            "trainer",
            "rank",
        ),
        coordinate=model_parts.coordinate,
    )


def staged(snapshot: Snapshot, buffers: dict[str, Tensor]) -> Snapshot:
    """Return a snapshot whose tensors are copies on the host.

    Training waits only for this copy in a background save. `buffers` receives the copies, is reused by later calls, and
    keeps none under names that this snapshot does not have.
    """
    for name in buffers.keys() - snapshot.tensors.keys():
        del buffers[name]
    copies: dict[str, Tensor] = {}
    for name, tensor in snapshot.tensors.items():
        local = local_part(tensor.detach())
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pinned = local.device.type == "cuda"
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        copies[name] = like(tensor, buffer)
    if any(tensor.device.type == "cuda" for tensor in snapshot.tensors.values()):
        # Copies to pinned memory return before they are done; the next optimizer step would overwrite what they still
        # read.
        torch.cuda.synchronize()
    return replace(snapshot, tensors=copies)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return `local` as the shard of a DTensor that is sharded like `tensor`; plain if that is plain."""
    if not isinstance(tensor, DTensor):
        return local
    # from_local would move host memory back to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def chunk_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offsets, sizes) of this rank's shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def mesh_of(model: nn.Module) -> dict[str, int]:
    """Return the axes that a model is sharded over, by name, with their sizes; none for a plain one."""
    mesh = _mesh(model)
    return {} if mesh is None else dict(zip(_axes(mesh), mesh.shape, strict=True))


def coordinate_of(model: nn.Module) -> dict[str, int]:
    """Return this rank's coordinate on the mesh that a model is sharded over, by axis."""
    mesh = _mesh(model)
    coordinate = None if mesh is None else mesh.get_coordinate()
    return {} if mesh is None or coordinate is None else dict(zip(_axes(mesh), coordinate, strict=True))


def _mesh(model: nn.Module) -> DeviceMesh | None:
    sharded = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next(sharded, None)


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))


def outline(snapshot: Snapshot) -> Outline:
    """Return shape, dtype and trained flag by name: what all ranks must agree on before anything moves."""
    return {
        name: (tuple(tensor.shape), str(tensor.dtype), name in snapshot.trained)
        for name, tensor in snapshot.tensors.items()
    }


class RandomState(NamedTuple):
    """The states of all global random generators of a process, in the generators' own types; cheap to take."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: Tensor | None


def random_state() -> RandomState:
    """Return the state of every global random generator of this process."""
    return RandomState(
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002 - the global generator is meant
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    )


def random_state_as_json(state: RandomState) -> dict[str, Any]:
    """Return random state JSON-ready."""
    version, numbers, gauss = state.python
    name, keys, position, has_gauss, cached = state.numpy
    plain: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), _text(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _text(state.torch.numpy().tobytes()),
    }
    if state.cuda is not None:
        plain["cuda"] = _text(state.cuda.numpy().tobytes())
    return plain


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state_as_json` returned."""
    decoded = _read(state)
    random.setstate(decoded.python)
    np.random.set_state(decoded.numpy)  # noqa: NPY002 - as above
    torch.set_rng_state(decoded.torch)
    if decoded.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(decoded.cuda)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Check a random state by setting it on temporary generators, which raise their own errors if it is invalid."""
    decoded = _read(state)
    random.Random().setstate(decoded.python)  # noqa: S311 - no secret
    np.random.RandomState().set_state(decoded.numpy)
    torch.Generator().set_state(decoded.torch)
    if decoded.cuda is not None and torch.cuda.is_available():
        torch.Generator("cuda").set_state(decoded.cuda)


def _read(state: Mapping[str, Any]) -> RandomState:
    version, numbers, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    array = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
    cuda = state.get("cuda")
    return RandomState(
        (version, tuple(numbers), gauss),
        (name, array, position, has_gauss, cached),
        _bytes(state["torch"]),
        None if cuda is None else _bytes(cuda),
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def with_companions(snapshot: Snapshot, companions: Mapping[str, Snapshot]) -> Snapshot:
    """Return one snapshot that holds those of companions too."""
    tensors, trained, ties = dict(snapshot.tensors), set(snapshot.trained), dict(snapshot.ties)
    optimizers = dict(snapshot.companions)
    for name, theirs in companions.items():
        tensors |= {companion_key(name, key): tensor for key, tensor in theirs.tensors.items()}
        trained |= {companion_key(name, key) for key in theirs.trained}
        ties |= {
            companion_key(name, first): tuple(companion_key(name, alias) for alias in tied)
            for first, tied in theirs.ties.items()
        }
        if theirs.optimizer is not None:
            optimizers[name] = theirs.optimizer
    return replace(
        snapshot,
        tensors=tensors,
        trained=frozenset(trained),
        ties=ties,
        companions=optimizers,
        contents=(*snapshot.contents, *companions),
    )


def companion_key(name: str, key: str) -> str:
    """Return the stored name of what a companion calls `key`."""
    return f"{name}.{key}"
