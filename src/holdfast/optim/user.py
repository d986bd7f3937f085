"""Optimizers of the user's choice: a class by its place, called with what the configuration says."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.config.sections.optim import UserOptimizerConfig
from holdfast.errors import ConfigError
from holdfast.optim.groups import REST, GroupPlan, param_groups, plan_groups
from holdfast.optim.user_check import try_optimizer
from holdfast.parallel.collectives import RankGroup

_TRIAL_LR = 0.01
"""Large enough for steps to stand out from the rounding of weights."""


def build_user_optimizer(
    config: UserOptimizerConfig,
    kind: Callable[..., Any],
    parameters: Mapping[str, nn.Parameter],
    ranks: RankGroup,
) -> Optimizer:
    """Return an optimizer of the user's class, tried on small parameters first; all ranks call this together.

    Raises:
        ConfigError, UnsavableOptimizer: The class, its arguments or its state cannot do what a run needs.
    """
    plans: list[GroupPlan] = []
    with ranks.together():
        plans += plan_groups(config, parameters)
        _check_class(config, kind)
        _check_arguments(config, kind, plans)

    def build_small(small: Mapping[str, nn.Parameter]) -> Optimizer:
        plan = GroupPlan(REST, True, tuple(small), _TRIAL_LR, config.weight_decay)
        return _made(config, kind, param_groups([plan], small), _TRIAL_LR)

    try_optimizer(build_small, parameters, ranks, f"optim.path {config.path}")
    made: list[Optimizer] = []
    with ranks.together():
        made.append(_made(config, kind, param_groups(plans, parameters), config.lr))
    return made[0]


def _check_class(config: UserOptimizerConfig, kind: Callable[..., Any]) -> None:
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise ConfigError(
            f"optim.path {config.path} is no optimizer but a {type(kind).__name__}. Name a class that is derived from "
            "torch.optim.Optimizer."
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optim.path {config.path} evaluates the loss several times per step (step needs a closure), and an update "
            "here makes one pass over its micro-batches. Choose an optimizer whose step() takes no closure."
        )


def _check_arguments(config: UserOptimizerConfig, kind: Callable[..., Any], plans: list[GroupPlan]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    if "lr" not in accepted:
        raise ConfigError(f"optim.path {config.path} takes no lr, so optim.lr and its schedule would change nothing.")
    if "weight_decay" not in accepted and any(plan.weight_decay for plan in plans):
        raise ConfigError(
            f"optim.path {config.path} takes no weight_decay, so optim.weight_decay would change nothing. Leave it 0."
        )
    names = [name for name in accepted if name not in {"params", "lr", "weight_decay"}]
    for name in config.kwargs:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}."
            raise ConfigError(f"optim.kwargs.{name}: {config.path} takes no {name}; {meant}")


def _made(config: UserOptimizerConfig, kind: Callable[..., Any], groups: list[dict[str, Any]], lr: float) -> Optimizer:
    accepted = inspect.signature(kind).parameters
    if "weight_decay" not in accepted:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        optimizer: Optimizer = kind(groups, lr=lr, **config.kwargs)
    except Exception as error:  # the class may raise anything
        words = ", ".join(f"{name}={value!r}" for name, value in config.kwargs.items()) or "no arguments of its own"
        raise ConfigError(
            f"optim.path {config.path} called with {words} raises {type(error).__name__}: {error}. Mend the class or "
            "optim.kwargs."
        ) from error
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(f"optim.path {config.path} keeps no lr in its param groups, so no schedule can set it.")
    return optimizer
