"""What our own forms of AdamW share: hyper-parameters, and an update of one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer


class HyperParameters(TypedDict, total=False):
    """What an AdamW is given besides parameters, where it is not what it usually is."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class PerParameterAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101); a subclass says how a parameter is updated."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, which has a gradient."""
        raise NotImplementedError
