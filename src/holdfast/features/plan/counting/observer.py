"""Observes every operation of a step: counts what it allocates, and answers where a number is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.features.plan.counting.memory import Ledger, plain_tensors

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
    """A dispatch mode that reports new tensors to a memory ledger."""

    def __init__(self, ledger: Ledger, answer: Callable[[Tensor, str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._ledger, self._asked = ledger, answer

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
