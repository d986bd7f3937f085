"""From the `optim` section to the optimizer of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.config.optim import OptimConfig, UserOptimizerConfig
from holdfast.errors import ConfigError
from holdfast.optim.build import build_optimizer
from holdfast.optim.user import build_user_optimizer
from holdfast.parallel.collectives import ProcessExchange
from holdfast.training.observe import load_function
from holdfast.training.together import together


def optimizer_of(
    config: OptimConfig, base: Path, parameters: Mapping[str, nn.Parameter], exchange: ProcessExchange
) -> Optimizer:
    """Return the optimizer over the trained parameters; all ranks call this together.

    Args:
        config: The section.
        base: The YAML's directory.
        parameters: Sharded, by canonical name.
        exchange: The ranks.

    Raises:
        UserError: It cannot be made, or could not be saved; the same on all ranks.
    """
    if isinstance(config, UserOptimizerConfig):
        kind = together(exchange, lambda: _class_at(config.path, base))
        return build_user_optimizer(config, kind, parameters, exchange)
    return together(exchange, lambda: build_optimizer(config, parameters))


def _class_at(path: str, base: Path) -> Any:
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        return load_function(path, base, "optim.path")
    try:
        module = importlib.import_module(place)
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(
            f"optim.path: {place} cannot be imported: {type(error).__name__}: {error}. Install its package, or name a "
            "file beside the YAML, as in my_file.py:MyOptimizer."
        ) from error
    if not hasattr(module, name):
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise ConfigError(f"optim.path: {place} has no {name}. It has {', '.join(classes) or 'no optimizer'}.")
    return getattr(module, name)
