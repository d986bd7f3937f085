"""Optimizer classes that a user names by import path: built with checks, and rehearsed on stand-ins before step 1.

An instance of the class makes steps on small parameters that are sharded like the model's. Another one goes on from the
state that a checkpoint would hold; where there are several ranks, a third does so on whole parameters. The second has
to end with the same bits, the third with the same numbers up to rounding.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from holdfast.config.public import argument_words
from holdfast.config.sections.optim import UserOptimizerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.optim.groups import REST, GroupPlan, param_groups, plan_groups
from holdfast.optim.randomness import private_randomness
from holdfast.optim.state import OptimizerState, UnsavableOptimizer, collect, restore
from holdfast.optim.state_template import zeros
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part, local_rows
from holdfast.parallel.stream import full_tensor
from holdfast.text.escaping import error_words

Parameters = Mapping[str, nn.Parameter]
Contents = Mapping[str, Any]
"""Whole tensors and other values of stand-ins and of their state, by what they are."""

_FIRST, _LAST = range(2), range(2, 4)
"""Steps before and after the save."""
_RATE = 0.01
"""Large enough for steps to stand out from the rounding of weights."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference between whole and sharded parameters, as a share of how far they moved; sums over shards are
rounded in another order."""


def build_user_optimizer(
    config: UserOptimizerConfig, kind: Callable[..., Any], parameters: Parameters, ranks: RankGroup
) -> Optimizer:
    """Return an optimizer of a user's class over a model's parameters; all ranks call this together.

    Raises:
        ConfigError: The class or its arguments cannot do what a run needs.
    """

    def build() -> Optimizer:
        plans = plan_groups(config, parameters)
        _check_class(config, kind)
        _check_arguments(config, kind, plans)
        return _call_class(config, kind, param_groups(plans, parameters), config.lr)

    return ranks.on_all_ranks(build)


def rehearse_user_optimizer(
    config: UserOptimizerConfig,
    kind: type[Optimizer],
    parameters: Parameters,
    ranks: RankGroup,
    all_raise: Callable[[], bool],
) -> None:
    """Save and restore the state of a user's class, and compare what steps make of it; all ranks call this together.

    Args:
        config: The section `optim`.
        kind: The optimizer's class.
        parameters: All parameters of the model by canonical name.
        ranks: The group of all ranks.
        all_raise: Returns, asked within an error, whether all ranks raise. Steps on shards may wait for other ranks: an
            error of one rank alone is raised as it is.

    Raises:
        ConfigError, UnsavableOptimizer: The class cannot train, shard or be saved; the same on all ranks.
    """
    name = f"optim.path {config.path}"

    def build(values: Parameters) -> Optimizer:
        plan = GroupPlan(REST, True, tuple(values), _RATE, config.weight_decay)
        return _call_class(config, kind, param_groups([plan], values), _RATE)

    with private_randomness():
        stand_ins = _stand_ins(parameters)
        with ranks.together():
            optimizer = build(stand_ins)
            _step(optimizer, stand_ins, _FIRST, f"{name} fails in its first steps", all_raise)
        saved = ranks.on_all_ranks(lambda: collect(optimizer, stand_ins))
        _refuse_other_state(ranks.gather(_outline(saved)), name)
        ends, instances = [_contents(saved, stand_ins)], [(optimizer, stand_ins)]
        for copy in (_copied, _whole)[: min(ranks.size, 2)]:
            copies = {key: nn.Parameter(copy(value)) for key, value in stand_ins.items()}
            tensors = {key: {slot: copy(value) for slot, value in of.items()} for key, of in saved.tensors.items()}
            with ranks.together():
                heir = build(copies)
                restore(heir, copies, replace(saved, tensors=tensors))
            for group, before in zip(heir.param_groups, optimizer.param_groups, strict=True):
                group.update(before | {"params": group["params"]})
            instances.append((heir, copies))
        known = {"state", "param_groups", "defaults"}
        lost = [key for key, value in vars(optimizer).items() if repr(value) != repr(vars(instances[1][0]).get(key))]
        for instance, values in instances:
            with ranks.together():
                _step(instance, values, _LAST, f"{name} fails after a save", all_raise)
                end = collect(instance, values)
            ends.append(_contents(end, values))
        _judge(ranks.gather(ends), name, sorted({*lost} - known))


def _step(
    optimizer: Optimizer, parameters: Parameters, steps: range, failing: str, all_raise: Callable[[], bool]
) -> None:
    try:
        for step in steps:
            torch.manual_seed(step)
            for number, value in enumerate(parameters.values()):
                value.grad = _shard_of(_numbers(value, 1000 * (step + 1) + number), value)
            optimizer.step()
            optimizer.zero_grad()
    except HoldfastError:
        raise
    except Exception as error:  # the class may raise anything
        if not all_raise():
            raise
        on_shards = any(isinstance(value, DTensor) and value.device_mesh.size() > 1 for value in parameters.values())
        raise ConfigError(
            f"{failing}{' on shards of parameters' * on_shards}: {error_words(error):.300} Choose another class, mend "
            "it, or change optim.kwargs."
        ) from error


def _judge(everyones: Sequence[Sequence[Contents]], name: str, lost: Sequence[str]) -> None:
    """Compare what stand-ins and state are before the last steps, and at the end of each instance, [rank][instance].

    Raises:
        UnsavableOptimizer: State that is not sharded differs between ranks.
        ConfigError: An instance that went on from a saved state ends elsewhere.
    """
    labels = sorted({label for ends in everyones for contents in ends for label in contents}, reverse=True)
    for label in labels:
        _, first, *_ = (contents.get(label) for contents in everyones[0])
        advice = f" It keeps {', '.join(lost)} beside them." if lost else ""
        for before, straight, reloaded, *whole in ([each.get(label) for each in ends] for ends in everyones):
            if not _gap(straight, first) <= 0:
                raise UnsavableOptimizer(
                    f"{name} cannot be saved: its {label} differs between ranks and is not sharded, so a checkpoint "
                    "would hold one rank's alone. Compute it from whole parameters, or keep it sharded."
                )
            if not _gap(straight, reloaded) <= 0:
                raise ConfigError(
                    f"{name} does not go on where it was saved: from its param groups and its state per parameter, "
                    f"{len(_LAST)} steps end with another {label}.{advice} Keep in optimizer.state and "
                    "optimizer.param_groups what steps depend on."
                )
            tolerance = _TOLERANCE.get(getattr(straight, "dtype", torch.float32), 1e-2)
            if whole and not _gap(straight, whole[0], before) <= tolerance:
                raise ConfigError(
                    f"{name} gives other numbers on shards than on whole parameters: {len(_LAST)} steps from the same "
                    f"state end with another {label}. Its step has to treat each element alone, or use operations of "
                    "DTensor; choose another class, or train on one rank."
                )


def _gap(ours: Any, theirs: Any, before: Any = None) -> float:
    """Return the largest difference of two tensors, as a share of the way from a third; inf between other values."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape):
        return 0.0 if type(ours) is type(theirs) and not isinstance(ours, Tensor) and ours == theirs else math.inf
    if torch.equal(ours, theirs):
        return 0.0
    way = theirs.double() - (before.double() if isinstance(before, Tensor) else 0.0)
    return float((ours.double() - theirs.double()).abs().max() / way.abs().max().clamp(min=1e-12))


def _outline(state: OptimizerState) -> list[tuple[str, str, bool]]:
    """Return (parameter, slot, whether it is sharded) of every tensor, in their order."""
    return [
        (name, slot, isinstance(value, DTensor))
        for name, of_one in state.tensors.items()
        for slot, value in of_one.items()
    ]


def _refuse_other_state(outlines: Sequence[list[tuple[str, str, bool]]], name: str) -> None:
    """Refuse state that differs between ranks, which no later comparison could gather."""
    rank = next((rank for rank, outline in enumerate(outlines) if outline != outlines[0]), None)
    if rank is not None:
        raise UnsavableOptimizer(
            f"{name} keeps other state on rank {rank} than on rank 0, so that no checkpoint could hold it: "
            f"{len(outlines[rank])} tensors and {len(outlines[0])}, or in another order. Choose another class, or "
            "mend it."
        )


def _contents(state: OptimizerState, parameters: Parameters) -> Contents:
    """Return weights and state, whole and on the host; all ranks call this together."""
    found: dict[str, Any] = {f"weight of {name}": value for name, value in parameters.items()}
    for slots in (state.tensors, state.values):
        found |= {
            f"state {slot!r} of {name}": value for name, of_one in slots.items() for slot, value in of_one.items()
        }
    return {label: _whole(value).cpu() if isinstance(value, Tensor) else value for label, value in found.items()}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _whole(tensor: Tensor) -> Tensor:
    return full_tensor(tensor.detach()).clone()


def _stand_ins(parameters: Parameters) -> dict[str, nn.Parameter]:
    """Return a small parameter for each number of dimensions and dtype, sharded alike, with rows on every rank."""
    kinds = {
        (value.ndim, value.dtype, value.numel() == 1): value for value in parameters.values() if value.requires_grad
    }
    stand_ins = {}
    for (dimensions, dtype, single), like in kinds.items():
        placements = enumerate(like.placements) if isinstance(like, DTensor) else ()
        ranks = [like.device_mesh.size(axis) for axis, placement in placements if isinstance(placement, Shard)]  # type: ignore[attr-defined]
        sides = (2 * max([2, *ranks]) - 1, *range(4, 4 + 2 * dimensions, 2))[:dimensions]
        small = zeros((1,) * dimensions if single else sides, like)
        kind = "1-element" if single else f"{dimensions}-dimensional"
        name = f"a {kind} {str(dtype).removeprefix('torch.')} parameter"
        stand_ins[name] = nn.Parameter(_shard_of(_numbers(small, 100 + dimensions), small))
    return stand_ins


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Return an unsharded tensor of normal random numbers, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64)
    return drawn.to(dtype=like.dtype, device=local_part(like.detach()).device)


def _shard_of(data: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of an unsharded tensor, as a DTensor with the sharding of `like`."""
    if not isinstance(like, DTensor):
        return data
    local = data[local_rows(like)].clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


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


def _call_class(
    config: UserOptimizerConfig, kind: Callable[..., Any], groups: list[dict[str, Any]], lr: float
) -> Optimizer:
    accepted = inspect.signature(kind).parameters
    if "weight_decay" not in accepted:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        optimizer: Optimizer = kind(groups, lr=lr, **config.kwargs)
    except Exception as error:  # the class may raise anything
        arguments = argument_words(config.kwargs) or "no arguments of its own"
        raise ConfigError(
            f"optim.path {config.path} called with {arguments} raises {error_words(error)}. Mend the class or "
            "optim.kwargs."
        ) from error
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(f"optim.path {config.path} keeps no lr in its param groups, so no schedule can set it.")
    return optimizer
