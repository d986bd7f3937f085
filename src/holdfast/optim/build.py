"""Build the optimizer of a run from the parameters that are trained, in named groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.config.optim import AdamWBF16Config, AdamWConfig, SGDConfig
from holdfast.optim.adamw_bf16 import AdamWBF16
from holdfast.optim.groups import param_groups, plan_groups


def build_optimizer(
    config: AdamWConfig | AdamWBF16Config | SGDConfig, parameters: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Return an optimizer over the trained parameters.

    Args:
        config: The section.
        parameters: All parameters by canonical name; frozen ones are left out, and get no state.

    Raises:
        ModelError: Nothing is trained.
        ConfigError: An entry of `groups` has no parameter.
    """
    groups = param_groups(plan_groups(config, parameters), parameters)
    match config:
        case AdamWConfig():
            fused = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        case AdamWBF16Config():
            return AdamWBF16(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case SGDConfig():
            return torch.optim.SGD(
                groups,
                lr=config.lr,
                momentum=config.momentum,
                dampening=config.dampening,
                nesterov=config.nesterov,
                foreach=True,
            )
