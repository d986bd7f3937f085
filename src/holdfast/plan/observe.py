"""Sees every operation of a step: what it allocates, what it computes, what it sends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.plan.memory import Ledger, plain_tensors
from holdfast.plan.traffic import Traffic


def _asked_by_transformers() -> str | None:
    """Return which line of transformers asks for a number on the host; None where it is not transformers that asks."""
    frame: Any = sys._getframe(2)
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    while frame is not None and f"{os.sep}transformers{os.sep}utils{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or f"{os.sep}transformers{os.sep}" not in frame.f_code.co_filename:
        return None
    return f"transformers checks its inputs in {frame.f_code.co_name}"


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Tells a ledger of tensors, and counts work and messages."""

    def __init__(self, ledger: Ledger, traffic: Traffic, asked: Callable[[Tensor, str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._ledger, self._traffic, self._asked = ledger, traffic, asked

    def __torch_dispatch__(  # noqa: D105, PLW3201 - torch's form
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor or a quantised tensor is taken apart, and its parts come here
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without numbers torch would make a second tensor of what is waited for
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            place = _asked_by_transformers()
            if place is not None:  # a check that a model makes of its inputs; ours hold what it asks for
                self._asked(args[0], place)
                return True
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for tensor in plain_tensors(leaf):
                    self._ledger.see(tensor)
        self._traffic.see(func, args, kwargs or {}, result)
        return result
