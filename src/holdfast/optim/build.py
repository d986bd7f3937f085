"""Build the optimizer of a run from the parameters that are trained, in named groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.config.optim import AdamWBF16Config, AdamWConfig, OptimConfig, SGDConfig
from holdfast.errors import ModelError
from holdfast.optim.adamw_bf16 import AdamWBF16


def build_optimizer(config: OptimConfig, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return an optimizer over the trained parameters.

    Args:
        config: The section.
        parameters: All parameters by canonical name; frozen ones are left out, and get no state.

    Raises:
        ModelError: Nothing is trained.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not trained:
        raise ModelError("No parameter is trained: model.freeze covers all of them.")
    groups = [group for group in _groups(config, trained) if group["params"]]
    match config:
        case AdamWConfig():
            fused = all(parameter.is_floating_point() for parameter in trained.values())
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        case AdamWBF16Config():
            return AdamWBF16(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case SGDConfig():
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def _groups(config: OptimConfig, trained: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    plain = {name for name in trained if any(re.search(pattern, name) for pattern in config.no_decay)}
    return [
        {
            "name": "decay",
            "params": [parameter for name, parameter in trained.items() if name not in plain],
            "weight_decay": config.weight_decay,
        },
        {
            "name": "no_decay",
            "params": [parameter for name, parameter in trained.items() if name in plain],
            "weight_decay": 0.0,
        },
    ]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
