"""Exponential moving averages of the trained weights, sharded like them.

Polyak & Juditsky (1992); as in Yazici et al. (arXiv:1806.04498), equation 3: average' = decay * average + (1 - decay) *
weight after every update. Nothing is gathered: each rank averages the shards it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holdfast.parallel.shards import local_part


@dataclass
class Averages:
    """The averages of a run; weights of 16 bits are averaged in float32, others in their own dtype."""

    decay: float
    start_step: int = 0
    """Averaging starts after so many steps; until then, each average equals its weight."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Averages by canonical name of the parameter, sharded like it."""

    @torch.no_grad()
    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set every average to its weight, allocating only averages that do not exist yet."""
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            if name not in self.tensors:
                wide = parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32
                self.tensors[name] = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
            local_part(self.tensors[name]).copy_(local_part(parameter))

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter], step: int, skipped: Tensor | None = None) -> None:
        """Average the weights in after an update.

        Args:
            parameters: The trained parameters by canonical name.
            step: Step of the update, counted from 0.
            skipped: [] bool on the weights' device, whether no update was made; the averages then stay as they are.
                None: one was made.
        """
        if step < self.start_step:
            self.begin(parameters)
            return
        for name, average in self.tensors.items():
            local, weight = local_part(average), local_part(parameters[name].detach())
            following = local if skipped is None else local.clone()
            following.mul_(self.decay).add_(weight.to(local.dtype), alpha=1 - self.decay)
            if skipped is not None:
                torch.where(skipped, local, following, out=local)

    @contextmanager
    def in_place(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Swap the averages and the weights within the block; both are restored bit for bit afterwards.

        No unit may be gathered when the block begins, or its old weights would be used.
        """
        before = {name: local_part(parameters[name].detach()).clone() for name in self.tensors}
        with torch.no_grad():
            for name, average in self.tensors.items():
                local_part(parameters[name].detach()).copy_(local_part(average))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in before.items():
                    local_part(parameters[name].detach()).copy_(weight)
