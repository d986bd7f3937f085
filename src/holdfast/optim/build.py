"""Build the optimizer of a run from the parameters that are trained, in named groups."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.config.sections.optim import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWBF16Config,
    AdamWConfig,
    AdamWFP8Config,
    LowBitConfig,
    MuonConfig,
    SGDConfig,
)
from holdfast.errors import ConfigError
from holdfast.optim.groups import REST, GroupPlan, param_groups, plan_groups
from holdfast.optim.lowbit import AdamW4bit, AdamW8bit, AdamWBF16, AdamWFP8
from holdfast.optim.muon import ADAMW, MUON, Muon, Stack

LOW_BIT = {"adamw_8bit": AdamW8bit, "adamw_4bit": AdamW4bit, "adamw_fp8": AdamWFP8}


def build_optimizer(
    config: AdamWConfig | AdamWBF16Config | LowBitConfig | SGDConfig | MuonConfig,
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
        case AdamW8bitConfig() | AdamW4bitConfig() | AdamWFP8Config():
            return LOW_BIT[config.kind](
                groups,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                compile_update=config.compile,
            )
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
    for algorithm, plan in _parts(config, plans, muon_names):
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


def _parts(config: MuonConfig, plans: Sequence[GroupPlan], muon_names: Collection[str]) -> list[tuple[str, GroupPlan]]:
    """Return what each algorithm has of every group; groups without a rate of their own have AdamW's there."""
    parts = [(MUON, replace(plan, names=tuple(name for name in plan.names if name in muon_names))) for plan in plans]
    for plan in plans:
        rest = replace(plan, names=tuple(name for name in plan.names if name not in muon_names))
        if plan.stem == REST and config.adamw_lr is not None:
            rest = replace(rest, stem=ADAMW, lr=config.adamw_lr)
        parts.append((ADAMW, rest))
    return [(algorithm, plan) for algorithm, plan in parts if plan.names]


def _matched(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _is_matrix(name: str, value: Tensor, vocabulary: Collection[str]) -> bool:
    """Return whether a parameter is a matrix, or one for each expert; experts' biases in one tensor are none."""
    return (
        name not in vocabulary
        and not name.endswith("bias")
        and (value.ndim == 2 or (value.ndim == 3 and "experts" in name))
    )
