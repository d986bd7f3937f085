"""Optimizer classes that a user names by import path, tried on small temporary parameters before one is built.

Three copies take the same steps: one on whole parameters, one on parameters sharded like the model's, and a third that
continues from the second's state after half of the steps, as a resumed run would. The first two must agree up to
rounding, the last two bit for bit.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
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
from holdfast.optim.tagged_json import encode
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part, local_rows
from holdfast.text.escaping import error_words

Build = Callable[[Mapping[str, nn.Parameter]], Optimizer]
"""Builds an optimizer over parameters by name."""

Parameters = Mapping[str, nn.Parameter]

_FIRST, _LAST = range(2), range(2, 4)
"""Steps before and after the third copy continues from a saved state."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference between whole and sharded parameters, as a share of how far they moved; sums over shards are
rounded in another order."""


def try_optimizer(
    build: Build, parameters: Parameters, ranks: RankGroup, all_raise: Callable[[], bool], name: str
) -> None:
    """Step, save and restore an optimizer on stand-ins of the trained parameters; all ranks call this together.

    Args:
        build: Builds the optimizer.
        parameters: The model's parameters by canonical name.
        ranks: The group of all ranks.
        all_raise: Returns, asked within an error, whether all ranks raise. Steps on shards may wait for other ranks: an
            error of one rank alone is raised as it is.
        name: Name of the optimizer in messages.

    Raises:
        ConfigError, UnsavableOptimizer: The optimizer cannot train, shard or be saved; the same on all ranks.
    """
    kinds = {
        (value.ndim, value.dtype, value.numel() == 1): value for value in parameters.values() if value.requires_grad
    }
    with private_randomness():
        small = {_kind_name(*kind): _stand_in(value) for kind, value in kinds.items()}
        unsharded = {key: nn.Parameter(_start(value)) for key, value in small.items()}
        shards = {key: nn.Parameter(_shard_of(_start(value), value)) for key, value in small.items()}
        with ranks.together():
            straight = build(unsharded)
            _run(straight, unsharded, _FIRST, f"{name} fails in its first steps", lambda: True)
        with ranks.together():
            optimizer = build(shards)
            _run(optimizer, shards, _FIRST, f"{name} works on whole parameters and fails on shards of them", all_raise)
        _check_on_shards(unsharded, shards, _FIRST.stop, ranks, name)
        saved = ranks.on_all_ranks(lambda: collect(optimizer, shards))
        _check_alike(saved, ranks, name)
        with ranks.together():
            copies = {key: nn.Parameter(value.detach().clone()) for key, value in shards.items()}
            heir, lost = _restored_copy(build, optimizer, copies, saved)
            _run(straight, unsharded, _LAST, f"{name} fails in its first steps", all_raise)
            _run(optimizer, shards, _LAST, f"{name} works on whole parameters and fails on shards of them", all_raise)
            _run(heir, copies, _LAST, f"{name} fails in its first steps after a save", all_raise)
        _check_on_shards(unsharded, shards, _LAST.stop, ranks, name)
        equal = {key: torch.equal(local_part(shards[key].detach()), local_part(copies[key].detach())) for key in copies}
        everywhere = ranks.gather(equal)
        differing = next((key for key in copies if not all(rank_equal[key] for rank_equal in everywhere)), None)
        if differing is not None:
            advice = f" It keeps {', '.join(lost)} beside them." if lost else ""
            raise ConfigError(
                f"{name} does not go on where it was saved: from its param groups and its state per parameter, "
                f"{len(_LAST)} steps end elsewhere on a {differing} parameter.{advice} Keep in optimizer.state "
                "and optimizer.param_groups what steps depend on."
            )


def _stand_in(parameter: Tensor) -> Tensor:
    """Return a small tensor like another in dtype, device, dimensions and sharding, with rows on every rank."""
    placements = enumerate(parameter.placements) if isinstance(parameter, DTensor) else ()
    ranks = [parameter.device_mesh.size(axis) for axis, placement in placements if isinstance(placement, Shard)]  # type: ignore[attr-defined]
    sides = (2 * max([2, *ranks]) - 1, *range(4, 4 + 2 * parameter.ndim, 2))[: parameter.ndim]
    return zeros((1,) * parameter.ndim if parameter.numel() == 1 else sides, parameter)


def _run(
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
        raise ConfigError(
            f"{failing}: {error_words(error):.300} Choose another class, mend it, or change optim.kwargs."
        ) from error


def _check_on_shards(unsharded: Parameters, shards: Parameters, steps: int, ranks: RankGroup, name: str) -> None:
    """Compare the weights of the sharded copy with those of the copy on whole parameters.

    Raises:
        ConfigError: They differ by more than rounding; on all ranks.
    """
    for key, value in unsharded.items():
        way = float((value.detach() - _start(value)).abs().max())
        expected = value.detach()[local_rows(shards[key])]
        differences = (local_part(shards[key].detach()) - expected).abs()
        largest = max(ranks.gather(float(differences.max()) if differences.numel() else 0.0))
        if not largest <= _TOLERANCE.get(value.dtype, 1e-2) * max(way, 1e-12):
            raise ConfigError(
                f"{name} gives other weights on shards than on whole parameters: after {steps} steps a {key} parameter "
                f"differs by {largest:.1e}, and has moved by {way:.1e}. Its step has to treat each element alone, or "
                "use operations of DTensor; choose another class, or train on one rank."
            )


def _check_alike(saved: OptimizerState, ranks: RankGroup, name: str) -> None:
    """Check that state which is not sharded is equal on all ranks.

    Raises:
        UnsavableOptimizer: It is not; on all ranks.
    """
    marks = {f"{name}, {slot}": repr(value) for name, state in saved.values.items() for slot, value in state.items()}
    for parameter, state in saved.tensors.items():
        plain = {slot: value for slot, value in state.items() if not isinstance(value, DTensor)}
        marks |= {f"{parameter}, {slot}": repr(encode(value)) for slot, value in plain.items()}
    everyones = ranks.gather(marks)
    for key in sorted({key for rank_marks in everyones for key in rank_marks}):
        if len({rank_marks.get(key) for rank_marks in everyones}) > 1:
            raise UnsavableOptimizer(
                f"{name} cannot be saved: its state ({key}) differs between ranks and is not sharded, so a checkpoint "
                "would hold one rank's alone. Compute it from whole parameters, or keep it sharded."
            )


def _restored_copy(
    build: Build, optimizer: Optimizer, parameters: Parameters, saved: OptimizerState
) -> tuple[Optimizer, list[str]]:
    """Return a new optimizer with a copy of the saved state, and the attributes in which it differs from the old."""
    heir = build(parameters)
    restore(heir, parameters, _copied(saved))
    for group, before in zip(heir.param_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    attributes = vars(optimizer).keys() - {"state", "param_groups", "defaults"}
    return heir, sorted(key for key in attributes if _differs(vars(heir).get(key), vars(optimizer)[key]))


def _copied(saved: OptimizerState) -> OptimizerState:
    tensors = {
        name: {slot: value.detach().clone() for slot, value in state.items()} for name, state in saved.tensors.items()
    }
    return replace(saved, tensors=tensors)


def _differs(before: Any, after: Any) -> bool:
    try:
        return bool(before != after)
    except (RuntimeError, ValueError):  # tensors have no one answer
        return True


def _start(like: Tensor) -> Tensor:
    """Return the unsharded start values of a parameter, equal for every copy."""
    return _numbers(like, 100 + like.ndim)


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


def _kind_name(dimensions: int, dtype: torch.dtype, single: bool) -> str:  # noqa: FBT001 - a key, taken apart
    kind = "1-element" if single else f"{dimensions}-dimensional"
    return f"{kind} {str(dtype).removeprefix('torch.')}"


_TRIAL_LR = 0.01
"""Large enough for steps to stand out from the rounding of weights."""


def build_user_optimizer(
    config: UserOptimizerConfig,
    kind: Callable[..., Any],
    parameters: Mapping[str, nn.Parameter],
    ranks: RankGroup,
    all_raise: Callable[[], bool] | None,
) -> Optimizer:
    """Return an optimizer of the user's class, tried on small parameters first; all ranks call this together.

    Args:
        config: The section `optim`.
        kind: The optimizer's class.
        parameters: All parameters of the model by canonical name.
        ranks: The group of all ranks.
        all_raise: As of `try_optimizer`; None in a plan, whose tensors hold no numbers that a trial could compare.

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
        return _call_class(config, kind, param_groups([plan], small), _TRIAL_LR)

    if all_raise is not None:
        try_optimizer(build_small, parameters, ranks, all_raise, f"optim.path {config.path}")
    return ranks.on_all_ranks(lambda: _call_class(config, kind, param_groups(plans, parameters), config.lr))


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
