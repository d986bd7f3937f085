"""Observes every operation of a step, and counts its allocations, messages between ranks and floating-point work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from holdfast.features.plan.counting.memory import Ledger, plain_tensors

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, OTHER = "all_gather", "reduce_scatter", "all_reduce", "other"
ALL_TO_ALL = "all_to_all"
_KINDS = {
    "_allgather_base_": ALL_GATHER,
    "allgather_": ALL_GATHER,
    "allgather_into_tensor_coalesced_": ALL_GATHER,
    "all_gather_into_tensor": ALL_GATHER,
    "all_gather_into_tensor_coalesced": ALL_GATHER,
    "all_gather_into_tensor_out": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "allreduce_": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
    "alltoall_base_": ALL_TO_ALL,
}
_SPACES = ("c10d", "_c10d_functional")
_NOT_SENT = {"wait_tensor", "barrier", "monitored_barrier_"}


@dataclass
class Messages:
    """Number and bytes of the collectives of one kind."""

    count: int = 0
    bytes: int = 0
    """Bytes that this rank sends, assuming ring algorithms."""


class Traffic:
    """Counters of messages and floating-point operations; `moment` returns the present phase of the step."""

    def __init__(self, moment: Callable[[], str]) -> None:
        self._moment = moment
        self.messages: dict[tuple[str, str], Messages] = defaultdict(Messages)
        """(phase, kind) -> messages"""
        self.flops: dict[str, float] = defaultdict(float)
        """Phase -> operations of matrix products and attention; a multiplication and an addition are two."""
        self.micro_batches = 1
        """Of an update, of which at most two are executed: the first stands for all but the last."""
        self.first_stands_for = 1.0
        """Tokens of all micro-batches but the last one executed, over those of the first."""
        self._calls, self._times, self._work = 0, 1, 1.0

    def restart(self) -> None:
        """Reset all counts."""
        self.messages.clear()
        self.flops.clear()

    def begin_phase(self) -> None:
        """Count what follows once, until a micro-batch begins."""
        self._calls, self._times, self._work = 0, 1, 1.0

    def begin_micro_batch(self) -> None:
        """Count what follows for as many micro-batches as it stands for: messages by their number, work by tokens."""
        for_others = self._calls == 0 and self.micro_batches > 2
        self._times = self.micro_batches - 1 if for_others else 1
        self._work = self.first_stands_for if for_others else 1.0
        self._calls += 1

    @contextlib.contextmanager
    def times(self, count: int) -> Iterator[None]:
        """Count the operations of the block `count` times."""
        before, self._times, self._work = (self._times, self._work), count, float(count)
        try:
            yield
        finally:
            self._times, self._work = before

    def scale(self, phase: str, factor: int) -> None:
        """Multiply the counts of a phase that was executed once and stands for several times."""
        for (of_phase, _), note in self.messages.items():
            if of_phase == phase:
                note.count, note.bytes = note.count * factor, note.bytes * factor
        if phase in self.flops:
            self.flops[phase] *= factor

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count one operation."""
        packet = func._overloadpacket
        flops_of = _OWN_FLOPS.get(packet.__name__)
        if flops_of is not None:
            self.flops[self._moment()] += flops_of(args, result) * self._work
        elif packet in flop_registry:
            # torch's formula of addmm does not know the overload whose fourth argument is the dtype of the sum.
            operands = args[:3] if packet is torch.ops.aten.addmm else args
            self.flops[self._moment()] += float(flop_registry[packet](*operands, **kwargs, out_val=result)) * self._work
        elif func.namespace in _SPACES and packet.__name__ not in _NOT_SENT:
            kind = _KINDS.get(packet.__name__, OTHER)
            note = self.messages[self._moment(), kind if kind != OTHER else packet.__name__]
            note.count += self._times
            note.bytes += _sent(kind, args, kwargs, result) * self._times


def _sent(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that a rank sends: (n - 1) / n of the whole for gathering and reducing, twice that for both."""
    sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
    largest, ranks = max(sizes, default=0), _ranks(args, kwargs)
    if kind in {ALL_GATHER, REDUCE_SCATTER} and ranks is None and sizes:
        ranks = max(1, largest // max(1, min(size for size in sizes if size)))
    share = 1.0 if not ranks else (ranks - 1) / ranks
    return round(largest * share * (2 if kind == ALL_REDUCE else 1))


def _ranks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]  # private

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return int(ProcessGroup.unbox(value).size())
            except (RuntimeError, TypeError, AttributeError):
                continue
        if isinstance(value, str):
            name: Any = value
            return int(_resolve_process_group(name).size())
    return None


def _varlen(args: tuple[Any, ...], _: Any) -> float:
    """Count causal attention over documents of the longest length; their real lengths are numbers on a device."""
    query, key, longest = args[0], args[1], args[6]
    return _products(query, min(longest, key.shape[0]))


def _varlen_backward(args: tuple[Any, ...], _: Any) -> float:
    """Count the backward pass of attention, which has five products for the two of the forward pass."""
    query, key = args[1], args[2]
    longest = next(value for value in args[8:] if isinstance(value, int))
    return 2.5 * _products(query, min(longest, key.shape[0]))


def _products(query: Tensor, keys: int) -> float:
    """Return the operations of causal attention: [T, heads, size] queries meet half of `keys` keys each, twice."""
    return 2.0 * 2.0 * query.numel() * keys / 2


def _grouped(args: tuple[Any, ...], _: Any) -> float:
    """Count one product for every row, whichever expert's matrix it is multiplied by."""
    lhs, rhs = args[0], args[1]
    if lhs.ndim == 2 and rhs.ndim == 3:
        return float(2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[2])
    return float(2 * lhs.shape[-2] * lhs.shape[-1] * rhs.shape[-1])


_OWN_FLOPS: dict[str, Callable[[tuple[Any, ...], Any], float]] = {
    "_varlen_attn": _varlen,
    "_varlen_attn_backward": _varlen_backward,
    "_grouped_mm": _grouped,
}


_KERNELS = ("torch_attn", "bitsandbytes")
"""Kernels that are not torch's own operations: without numbers nothing else looks at where their operands are."""


def _refuse_two_devices(func: Any, operands: Any) -> None:
    """Raise where a kernel would read memory of another device.

    Raises:
        RuntimeError: As a GPU would.
    """
    devices = {leaf.device.type for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{func} has operands on {' and '.join(sorted(devices))}")


_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def _is_indexed_from_host(tensor: Tensor, indices: Any) -> bool:
    """Return whether host tensors index a tensor on a device: torch copies the indices and waits."""
    devices = [leaf.device.type for leaf in tree_leaves(indices) if isinstance(leaf, Tensor)]
    return tensor.device.type != "cpu" and "cpu" in devices


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return what a grouped product on the CPU gives; torch's form without numbers knows bfloat16 alone."""
    if left.ndim == right.ndim == 2 and offs is not None:
        return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
    batch = left.shape[:1] if left.ndim == right.ndim == 3 else ()
    return left.new_empty(*batch, left.shape[-2], right.shape[-1])


def _asked_by_transformers() -> str | None:
    """Return which line of transformers asks for a number on the host; None where it is not transformers that asks."""
    frame: Any = sys._getframe(3)
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    while frame is not None and f"{os.sep}transformers{os.sep}utils{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or f"{os.sep}transformers{os.sep}" not in frame.f_code.co_filename:
        return None
    return f"transformers checks its inputs in {frame.f_code.co_name}"


class TensorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A dispatch mode that reports new tensors to a memory ledger, and counts floating-point work and messages."""

    def __init__(self, ledger: Ledger, traffic: Traffic, answer: Callable[[Tensor, str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._ledger, self._traffic, self._asked = ledger, traffic, answer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let blocks be compiled within the mode, which sees the operations that their programs run."""
        return True

    def __torch_dispatch__(  # noqa: D105, PLW3201 - torch's form
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor or a quantised tensor is taken apart, and its parts come here
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without numbers torch would make a second tensor of what is waited for
        if func is torch.ops.aten._local_scalar_dense.default and self._is_answered(args[0]):
            return True
        self._look_at_devices(func, args, kwargs)
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "cpu":
            result = _grouped_product(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self._see(result)
        self._traffic.see(func, args, kwargs or {}, result)
        return result

    def _look_at_devices(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if func.namespace in _KERNELS:
            _refuse_two_devices(func, (args, kwargs))
        if func.overloadpacket in _INDEXED and _is_indexed_from_host(args[0], args[1]):
            self._asked(args[0], "an index that lies on the host")

    def _is_answered(self, value: Tensor) -> bool:
        """Record an input check of a transformers model and answer that it holds, as it does for our inputs."""
        caller = _asked_by_transformers() if value.dtype is torch.bool else None
        if caller is not None:
            self._asked(value, caller)
        return caller is not None

    def _see(self, result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for tensor in plain_tensors(leaf):
                    self._ledger.see(tensor)
