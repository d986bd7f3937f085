"""Counts the bytes of tensors by kind and phase while a step runs, on real devices or on fake ones.

What a tensor is counted as follows from where it was made: gathered by FSDP2, in the head, in a forward or a backward
pass; parameters, gradients and optimizer states are named when they are known. A tensor's memory is its storage's, so
views cost nothing, and it counts until the last view is gone or FSDP2 has emptied it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from holdfast.features.plan.counting.kinds import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, PARAMETERS, TEMPORARY
from holdfast.parallel.activations import ActivationOffload
from holdfast.parallel.copies import ComputeCopies

HOOKED = ("unshard", "wait_for_unshard", "post_backward")
"""Methods of FSDP2's FSDPParamGroup that are entered to tell gathered parameters and gradients from the rest."""
_HEAD_NODES = ("_RecomputeBackward", "WithGradientsBackward")
_LARGE = 2**16
"""Bytes from which on it is asked which operation of a backward pass makes a tensor."""


@dataclass
class Peak:
    """The largest number of bytes that was allocated at one moment of a phase, and its parts by kind."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Storage:
    size: int
    kind: str
    device: str
    reference: Any


class Ledger:
    """Counts the bytes of live storages.

    `rounding` maps a device type to the number of bytes that its allocator rounds each allocation up to.
    """

    def __init__(self, rounding: Mapping[str, int] | None = None) -> None:
        self._rounding = {"cuda": 512} if rounding is None else dict(rounding)
        self._storages: dict[int, _Storage] = {}
        self._scopes: list[str] = []
        self.phase = "load"
        self.loading = PARAMETERS
        """What is made while models are loaded."""
        self.current: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Device type -> kind -> bytes that are allocated."""
        self.totals: dict[str, int] = defaultdict(int)
        self.peaks: dict[tuple[str, str], Peak] = defaultdict(Peak)
        """(phase, device type) -> peak"""
        self.allocated: dict[tuple[str, str, str], int] = defaultdict(int)
        """(phase, device type, dtype) -> bytes of all tensors that were made, whenever they were freed"""

    @property
    def moment(self) -> str:
        """The current phase; within a training pass, `forward` or `backward`."""
        if self.phase in {"forward_backward", "critic"}:
            # autograd numbers the backward pass that is running; -1 means that none is. torch has no public name for
            # this.
            return "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        return self.phase

    @contextlib.contextmanager
    def scope(self, kind: str) -> Iterator[None]:
        """Count storages that are allocated within the block as a kind, on any device."""
        self._scopes.append(kind)
        try:
            yield
        finally:
            self._scopes.pop()

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        # `untyped_storage` returns a new Python object at each call; `_cdata`, the address of the C++ storage,
        # identifies it.
        key = storage._cdata
        if key in self._storages:
            return
        device, size = tensor.device.type, storage.nbytes()
        if device == "meta":
            return
        reference = weakref.ref(storage, functools.partial(self._freed, key))
        entry = self._storages[key] = _Storage(0, self._kind(size), device, reference)
        self._resize(entry, size)
        self.allocated[self.moment, device, str(tensor.dtype).removeprefix("torch.")] += size

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors as a kind from now on."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self.see(plain)
                entry = self._storages.get(plain.untyped_storage()._cdata)
                if entry is not None and entry.kind != kind:
                    self.current[entry.device][entry.kind] -= entry.size
                    self.current[entry.device][kind] += entry.size
                    entry.kind = kind

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that has grown or was emptied."""
        entry = self._storages.get(storage._cdata)
        if entry is None:
            return
        # FSDP2 frees gathered parameters by resizing their storage to 0, and gathers into the same storage later.
        if entry.size == 0 and self._scopes:
            entry.kind = self._scopes[-1]
        self._resize(entry, storage.nbytes())

    def restart(self) -> None:
        """Forget the peaks so far; what is allocated stays counted."""
        self.peaks.clear()
        self.allocated.clear()

    def _resize(self, entry: _Storage, size: int) -> None:
        unit = self._rounding.get(entry.device, 1)
        size = -(-size // unit) * unit
        more, entry.size = size - entry.size, size
        self.current[entry.device][entry.kind] += more
        self.totals[entry.device] += more
        if more > 0:
            peak = self.peaks[self.moment, entry.device]
            if self.totals[entry.device] > peak.total:
                peak.total, peak.by_kind = self.totals[entry.device], dict(self.current[entry.device])

    def _freed(self, key: int, _: object) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self.current[entry.device][entry.kind] -= entry.size
            self.totals[entry.device] -= entry.size

    def _kind(self, size: int) -> str:
        if self._scopes:
            return self._scopes[-1]
        if self.phase == "load":
            return self.loading
        if torch.is_grad_enabled() and self.phase not in {"optimizer", "save"}:
            return ACTIVATIONS  # of a forward pass, or made again in a backward pass
        if size >= _LARGE and torch._C._current_graph_task_id() != -1:
            node: Any = torch._C._current_autograd_node()
            if node is not None and node.name() in _HEAD_NODES:
                return HEAD
        return TEMPORARY


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors that have memory: the local part of a DTensor, the inner tensors of a quantised one."""
    if isinstance(tensor, DTensor):
        # `to_local` makes a view through autograd, which the dispatch mode would count as an operation of the step.
        yield from plain_tensors(tensor._local_tensor)
    elif isinstance(tensor, Tensor) and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor


@contextlib.contextmanager
def watched_storages(ledger: Ledger) -> Iterator[None]:
    """Report to a ledger which storages are resized, and what is gathered, copied and reduced, within the block."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_
    before = {name: getattr(FSDPParamGroup, name) for name in HOOKED}
    enter, add, start_backward = ComputeCopies.enter, ComputeCopies.add, ActivationOffload.start_backward

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    def gathering(name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            with ledger.scope(GATHERED):
                result = before[name](group, *args, **kwargs)
            if name == "wait_for_unshard":
                _follow_gradients(ledger, [parameter._unsharded_param for parameter in group.fsdp_params])
            return result

        return call

    def reducing(group: Any, *args: Any, **kwargs: Any) -> Any:
        with ledger.scope(GRADIENTS):
            return before["post_backward"](group, *args, **kwargs)

    def copying(copies: ComputeCopies) -> None:
        with ledger.scope(GATHERED):
            enter(copies)
        _follow_gradients(ledger, copies.tensors)

    def adding(copies: ComputeCopies, unit: Any) -> None:
        with ledger.scope(GRADIENTS):
            add(copies, unit)

    def fetching(offload: ActivationOffload, block_pass: Any) -> None:
        with ledger.scope(ACTIVATIONS):
            start_backward(offload, block_pass)

    hooked = {"unshard": gathering("unshard"), "wait_for_unshard": gathering("wait_for_unshard")}
    # A resize is no operator, so that the dispatch mode does not see it; the method itself has to be replaced.
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
    for name, call in (hooked | {"post_backward": reducing}).items():
        setattr(FSDPParamGroup, name, call)
    ComputeCopies.enter, ComputeCopies.add = copying, adding  # type: ignore[method-assign,assignment]
    ActivationOffload.start_backward = fetching  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ComputeCopies.enter, ComputeCopies.add = enter, add  # type: ignore[method-assign]
        ActivationOffload.start_backward = start_backward  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        for name, method in before.items():
            setattr(FSDPParamGroup, name, method)


_FOLLOWED = "_holdfast_gradient_followed"


def _follow_gradients(ledger: Ledger, parameters: Iterable[Any]) -> None:
    """Count the gradients of parameters as gradients as soon as they are accumulated."""
    for parameter in parameters:
        if parameter.requires_grad and not hasattr(parameter, _FOLLOWED):
            setattr(parameter, _FOLLOWED, True)
            parameter.register_post_accumulate_grad_hook(lambda value: ledger.name([value.grad], GRADIENTS))


def follow_model(ledger: Ledger, model: nn.Module, kind: str = PARAMETERS) -> None:
    """Count a model's parameters and buffers as a kind, and what its head makes as the head's."""
    tensors = [*model.parameters(), *model.buffers()]
    ledger.name(tensors, kind)
    _follow_gradients(ledger, [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)])
    scored: Any = getattr(model, "_scored", None)
    if scored is not None:

        def in_scope(*args: Any, **kwargs: Any) -> Any:
            with ledger.scope(HEAD):
                return scored(*args, **kwargs)

        # nn.Module's own `__setattr__` would register modules and parameters; a plain attribute must shadow the method.
        object.__setattr__(model, "_scored", in_scope)
