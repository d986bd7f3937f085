"""Build the optimizer of a run from the section `optim`, over the trained parameters in named groups."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.config.sections.optim import (
    AdamW8bitConfig,
    AdamWBF16Config,
    AdamWConfig,
    MuonConfig,
    OptimConfig,
    SGDConfig,
    UserOptimizerConfig,
)
from holdfast.errors import ConfigError
from holdfast.files import look_beside
from holdfast.models.adapters.live import adapters_of
from holdfast.models.heads.policy import PolicyModel
from holdfast.optim.averages import Averages
from holdfast.optim.groups import REST, GroupPlan, param_groups, plan_groups
from holdfast.optim.lowbit import AdamW8bit, AdamWBF16
from holdfast.optim.muon import ADAMW, MUON, Muon, Stack
from holdfast.optim.user import build_user_optimizer
from holdfast.parallel.shards import sharded_parameters
from holdfast.text.escaping import error_words
from holdfast.training.observe import load_function
from holdfast.training.run import ConfiguredRun, Run


def build_optimizer(
    config: AdamWConfig | AdamWBF16Config | AdamW8bitConfig | SGDConfig | MuonConfig,
    parameters: Mapping[str, nn.Parameter],
    vocabulary: Collection[str] = (),
    stacks: Mapping[str, Stack] | None = None,
) -> Optimizer:
    """Return an optimizer over the trained parameters.

    Args:
        config: The section.
        parameters: All parameters by canonical name; frozen ones are left out, and get no state.
        vocabulary: Those with a row per token, place or output, embeddings and heads: Muon leaves them to AdamW.
        stacks: Those that hold a matrix for each expert in one.

    Raises:
        ModelError: Nothing is trained.
        ConfigError: An entry of `groups` has no parameter, or a package is missing.
    """
    plans = plan_groups(config, parameters)
    if isinstance(config, MuonConfig):
        return _muon(config, plans, parameters, vocabulary, stacks or {})
    groups = param_groups(plans, parameters)
    match config:
        case AdamWConfig():
            fused = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        case AdamWBF16Config():
            return AdamWBF16(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case AdamW8bitConfig():
            return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case SGDConfig():
            return torch.optim.SGD(
                groups,
                lr=config.lr,
                momentum=config.momentum,
                dampening=config.dampening,
                nesterov=config.nesterov,
                foreach=True,
            )


def _muon(
    config: MuonConfig,
    plans: Sequence[GroupPlan],
    parameters: Mapping[str, nn.Parameter],
    vocabulary: Collection[str],
    stacks: Mapping[str, Stack],
) -> Muon:
    """Split every group between the two algorithms.

    Raises:
        ConfigError: No matrix is left, or a pattern of `adamw` names none.
    """
    matrices = [
        name for name, value in parameters.items() if value.requires_grad and _is_matrix(name, value, vocabulary)
    ]
    for pattern in config.adamw:
        if not _matched([pattern], matrices):
            raise ConfigError(
                f"optim.adamw: {pattern!r} names no matrix that Muon would update; those are "
                f"{', '.join(matrices[:3]) or 'none'}. Remove it, or mend the pattern."
            )
    muon_names = {*matrices} - _matched(config.adamw, matrices)
    if not muon_names:
        raise ConfigError(
            "optim.kind: muon updates matrices, and none is trained besides embeddings, the head and what optim.adamw "
            "names. Use optim.kind: adamw."
        )
    groups = []
    for algorithm, plan in _algorithm_plans(config, plans, muon_names):
        groups += [group | {"algorithm": algorithm} for group in param_groups([plan], parameters)]
    return Muon(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        iterations=config.iterations,
        scale=config.scale,
        iterate_in=getattr(torch, config.iterate_in),
        betas=config.betas,
        eps=config.eps,
        stacks={parameters[name]: stack for name, stack in stacks.items() if name in muon_names},
    )


def _algorithm_plans(
    config: MuonConfig, plans: Sequence[GroupPlan], muon_names: Collection[str]
) -> list[tuple[str, GroupPlan]]:
    """Return what each algorithm has of every group; groups without a rate of their own have AdamW's there."""
    algorithm_plans = [
        (MUON, replace(plan, names=tuple(name for name in plan.names if name in muon_names))) for plan in plans
    ]
    for plan in plans:
        adamw_plan = replace(plan, names=tuple(name for name in plan.names if name not in muon_names))
        if plan.stem == REST and config.adamw_lr is not None:
            adamw_plan = replace(adamw_plan, stem=ADAMW, lr=config.adamw_lr)
        algorithm_plans.append((ADAMW, adamw_plan))
    return [(algorithm, plan) for algorithm, plan in algorithm_plans if plan.names]


def _matched(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _is_matrix(name: str, value: Tensor, vocabulary: Collection[str]) -> bool:
    """Return whether a parameter is a matrix, or one for each expert; experts' biases in one tensor are none."""
    return (
        name not in vocabulary
        and not name.endswith("bias")
        and (value.ndim == 2 or (value.ndim == 3 and "experts" in name))
    )


def optimizer_of(run: Run, parameters: Mapping[str, nn.Parameter], policy: PolicyModel | None = None) -> Optimizer:
    """Return the optimizer over the trained parameters; all ranks call this together.

    Args:
        run: Where it is made.
        parameters: Sharded, by canonical name.
        policy: Whose they are, where that is a model that trains.

    Raises:
        UserError: It cannot be made, or could not be saved; the same on all ranks.
    """
    config, ranks = run.config.optim, run.ranks
    if isinstance(config, UserOptimizerConfig):
        kind = ranks.on_all_ranks(lambda: _class_at(config.path, run))
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


def _class_at(path: str, run: ConfiguredRun) -> Any:
    module_path, _, name = path.rpartition(":")
    if module_path.endswith(".py"):
        return load_function(path, run.base, "optim.path")
    look_beside(run.base)
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(
            f"optim.path: {module_path} cannot be imported: {error_words(error)}. Install its package, or name a "
            "file beside the YAML, as in my_file.py:MyOptimizer."
        ) from error
    if not hasattr(module, name):
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise ConfigError(f"optim.path: {module_path} has no {name}. It has {', '.join(classes) or 'no optimizer'}.")
    return getattr(module, name)
