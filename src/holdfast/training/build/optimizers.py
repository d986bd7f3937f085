"""From the `optim` section to the optimizer of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.config.sections.optim import OptimConfig, UserOptimizerConfig
from holdfast.errors import ConfigError
from holdfast.models.adapters.live import adapters_of
from holdfast.models.heads.policy import PolicyModel
from holdfast.optim.averages import Averages
from holdfast.optim.build import build_optimizer
from holdfast.optim.muon import Stack
from holdfast.optim.user import build_user_optimizer
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.observe import load_function
from holdfast.training.run import RunFile, Setting


def optimizer_of(
    setting: Setting, parameters: Mapping[str, nn.Parameter], policy: PolicyModel | None = None
) -> Optimizer:
    """Return the optimizer over the trained parameters; all ranks call this together.

    Args:
        setting: Where it is made.
        parameters: Sharded, by canonical name.
        policy: Whose they are, where that is a model that trains.

    Raises:
        UserError: It cannot be made, or could not be saved; the same on all ranks.
    """
    config, ranks = setting.config.optim, setting.ranks
    if isinstance(config, UserOptimizerConfig):
        kind = ranks.on_all_ranks(lambda: _class_at(config.path, setting))
        return build_user_optimizer(config, kind, parameters, ranks)
    vocabulary, stacks = (set[str](), {}) if policy is None else (vocabulary_of(policy), stacks_of(policy))
    return ranks.on_all_ranks(lambda: build_optimizer(config, parameters, vocabulary, stacks))


def averages_of(config: OptimConfig, parameters: Mapping[str, nn.Parameter]) -> Averages | None:
    """Return the averages that the section asks for, equal to the weights."""
    if config.ema is None:
        return None
    averages = Averages(config.ema.decay, config.ema.start_step)
    averages.begin(parameters)
    return averages


def vocabulary_of(policy: PolicyModel) -> set[str]:
    """Return the names of the parameters with a row per token, place or output: embeddings, heads, scores."""
    model: Any = policy.language_model
    modules = [model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None)]
    modules += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    owned = {id(value) for module in modules if module is not None for value in module.parameters()}
    return {name for name, value in sharded_parameters(policy).items() if id(value) in owned}


def stacks_of(policy: PolicyModel) -> dict[str, Stack]:
    """Return the adapters of experts, which lie in one matrix for all of them."""
    stacks = {}
    for adapter in adapters_of(policy.language_model).values():
        if adapter.experts:
            stacks[adapter.a] = Stack(adapter.experts, by_columns=False)
            stacks[adapter.b] = Stack(adapter.experts, by_columns=True)
    return stacks


def _class_at(path: str, setting: RunFile) -> Any:
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        return load_function(path, setting.base, "optim.path")
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
