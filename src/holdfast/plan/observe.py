"""Sees every operation of a step: what it allocates, what it computes, what it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.plan.memory import Ledger, plain_tensors
from holdfast.plan.traffic import Traffic


class Observer(TorchDispatchMode):
    """Tells a ledger of tensors, and counts work and messages."""

    def __init__(self, ledger: Ledger, traffic: Traffic) -> None:
        super().__init__()
        self._ledger, self._traffic = ledger, traffic

    def __torch_dispatch__(  # noqa: D105, PLW3201 - torch's form
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor or a quantised tensor is taken apart, and its parts come here
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # without numbers torch would make a second tensor of what is waited for
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for tensor in plain_tensors(leaf):
                    self._ledger.see(tensor)
        self._traffic.see(func, args, kwargs or {}, result)
        return result
