"""A user's optimizer, tried on small throw-away parameters before anything depends on it.

Three copies take the same steps: one on whole parameters, one on parameters sharded like the model's, and one that is
saved after half of the steps and goes on from what was saved. They must end alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import ConfigError, HoldfastError
from holdfast.optim.inert import stand_in
from holdfast.optim.randomness import private_randomness
from holdfast.optim.state import OptimizerState, UnsavableOptimizer, collect, restore
from holdfast.optim.tagged import encode
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.shards import local_part, local_rows

Build = Callable[[Mapping[str, nn.Parameter]], Optimizer]
"""Makes the optimizer over named parameters."""

_STEPS = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Between whole and sharded, as a share of the way that was gone: sums over shards round otherwise."""


def try_optimizer(build: Build, parameters: Mapping[str, nn.Parameter], exchange: ProcessExchange, name: str) -> None:
    """Step, save and restore an optimizer on stand-ins of the trained parameters; all ranks call this together.

    Args:
        build: Makes it.
        parameters: The model's, by canonical name.
        exchange: The ranks.
        name: How messages call it.

    Raises:
        ConfigError, UnsavableOptimizer: The optimizer cannot train, shard or be saved; the same on all ranks.
    """
    kinds = {
        (value.ndim, value.dtype, value.numel() == 1): value for value in parameters.values() if value.requires_grad
    }
    with private_randomness():
        small = {_words(*kind): stand_in(value) for kind, value in kinds.items()}
        sharded = any(isinstance(value, DTensor) for value in small.values())
        whole = _started(small, whole=True)
        with exchange.together():
            _run(build(whole), whole, range(_STEPS), f"{name} fails in its first steps")
        if sharded:
            shards = _started(small, whole=False)
            with exchange.together():
                _run(
                    build(shards),
                    shards,
                    range(_STEPS),
                    f"{name} works on whole parameters and fails on shards of them",
                )
            _compare(name, whole, shards, exchange)
        _save_and_go_on(build, small, whole=not sharded, name=name, exchange=exchange)


def _save_and_go_on(
    build: Build, small: Mapping[str, nn.Parameter], *, whole: bool, name: str, exchange: ProcessExchange
) -> None:
    """Stop half-way, go on with what a checkpoint would hold, and end where the optimizer itself ends."""
    middle = _STEPS // 2
    straight = _started(small, whole=whole)
    with exchange.together():
        optimizer = build(straight)
        _run(optimizer, straight, range(middle), f"{name} fails in its first steps")
        saved = _copied(collect(optimizer, straight))
        _check_tensors(saved, straight, name)
    marks = exchange.gather(_marks(saved))
    with exchange.together():
        _check_alike(marks, name)
        resumed = {key: _copy(value) for key, value in straight.items()}
        fresh = build(resumed)
        restore(fresh, resumed, saved)
        for group, before in zip(fresh.param_groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})
        attributes = vars(optimizer).keys() - {"state", "param_groups", "defaults"}
        began = {key: vars(fresh).get(key) for key in attributes}
        _go_on(optimizer, straight, middle)
        _go_on(fresh, resumed, middle)
        for key, value in straight.items():
            if not torch.equal(local_part(value.detach()), local_part(resumed[key].detach())):
                differing = sorted(key for key in attributes if _differs(began[key], vars(optimizer)[key]))
                where = f" It keeps {', '.join(differing)} beside them." if differing else ""
                raise ConfigError(
                    f"{name} does not go on where it was saved: from its param groups and its state per parameter, two "
                    f"steps end elsewhere on a {key} parameter.{where} Keep in optimizer.state and "
                    "optimizer.param_groups what steps depend on."
                )


def _started(small: Mapping[str, nn.Parameter], *, whole: bool) -> dict[str, nn.Parameter]:
    """Return stand-ins with numbers in them, the same for all copies."""
    made = {}
    for number, (name, value) in enumerate(small.items()):
        data = _numbers(value, 100 + number)
        made[name] = nn.Parameter(data if whole else _shard_of(data, value))
    return made


def _run(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], steps: range, failing: str) -> None:
    try:
        for step in steps:
            _step(optimizer, parameters, step)
    except HoldfastError:
        raise
    except Exception as error:  # the class may raise anything
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{failing}: {type(error).__name__}: {first:.300} Choose another class, mend it, or change optim.kwargs."
        ) from error


def _go_on(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], first: int) -> None:
    torch.manual_seed(first)
    for step in range(first, _STEPS):
        _step(optimizer, parameters, step)


def _step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    for number, value in enumerate(parameters.values()):
        gradient = _numbers(value, 1000 * (step + 1) + number)
        value.grad = _shard_of(gradient, value) if isinstance(value, DTensor) else gradient
    optimizer.step()
    optimizer.zero_grad()


def _compare(
    name: str, whole: Mapping[str, nn.Parameter], shards: Mapping[str, nn.Parameter], exchange: ProcessExchange
) -> None:
    for number, (key, value) in enumerate(whole.items()):
        way = float((value.detach() - _numbers(value, 100 + number)).abs().max())
        part = value.detach()[local_rows(shards[key])]
        differences = (local_part(shards[key].detach()) - part).abs()
        largest = max(exchange.gather(float(differences.max()) if differences.numel() else 0.0))
        if not largest <= _TOLERANCE.get(value.dtype, 1e-2) * max(way, 1e-12):
            raise ConfigError(
                f"{name} gives other weights on shards than on whole parameters: after {_STEPS} steps a {key} "
                f"parameter differs by {largest:.1e}, and has moved by {way:.1e}. Its step has to treat each element "
                "alone, or use operations of DTensor; choose another class, or train on one rank."
            )


def _check_tensors(saved: OptimizerState, parameters: Mapping[str, nn.Parameter], name: str) -> None:
    for key, state in saved.tensors.items():
        parameter = parameters[key]
        for slot, value in state.items():
            where = f"{name} cannot be saved: state {slot!r} of a {key} parameter"
            if type(value) not in {Tensor, nn.Parameter, DTensor}:
                raise UnsavableOptimizer(f"{where} is a {type(value).__qualname__}, which has no written form.")
            if not isinstance(parameter, DTensor):
                continue
            if not isinstance(value, DTensor):
                if value.ndim and value.shape in {parameter.shape, local_part(parameter).shape}:
                    raise UnsavableOptimizer(
                        f"{where} is a plain tensor beside a sharded parameter. Make it with torch.zeros_like("
                        "parameter), so that it is sharded as well."
                    )
            elif value.device_mesh != parameter.device_mesh or any(place.is_partial() for place in value.placements):
                raise UnsavableOptimizer(f"{where} is a part of a sum ({value.placements}). Redistribute it first.")


def _marks(saved: OptimizerState) -> dict[str, str]:
    """Return what must be the same on every rank: values, and tensors that are not sharded."""
    marks = {f"{name}, {slot}": repr(value) for name, state in saved.values.items() for slot, value in state.items()}
    for name, state in saved.tensors.items():
        for slot, value in state.items():
            if not isinstance(value, DTensor):
                marks[f"{name}, {slot}"] = repr(encode(value))
    return marks


def _check_alike(marks: list[dict[str, str]], name: str) -> None:
    other = next((key for key in marks[0] if any(mark.get(key) != marks[0][key] for mark in marks)), None)
    if other is not None or any(mark.keys() != marks[0].keys() for mark in marks):
        raise UnsavableOptimizer(
            f"{name} cannot be saved: its state ({other or 'by name'}) differs between ranks and is not sharded, so a "
            "checkpoint would hold one rank's alone. Compute it from whole parameters, or keep it sharded."
        )


def _differs(before: Any, after: Any) -> bool:
    try:
        return bool(before != after)
    except (RuntimeError, ValueError):  # tensors have no one answer
        return True


def _copied(saved: OptimizerState) -> OptimizerState:
    tensors = {
        name: {slot: value.detach().clone() for slot, value in state.items()} for name, state in saved.tensors.items()
    }
    return OptimizerState(saved.kind, saved.groups, tensors, saved.values, saved.wrapped)


def _copy(value: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.detach().clone())


def _numbers(like: Tensor, seed: int) -> Tensor:
    """Return whole normal numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64)
    return drawn.to(dtype=like.dtype, device=local_part(like.detach()).device)


def _shard_of(data: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor's part on this rank, sharded like another."""
    if not isinstance(like, DTensor):
        return data
    local = data[local_rows(like)].clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _words(dimensions: int, dtype: torch.dtype, single: bool) -> str:  # noqa: FBT001 - a key, taken apart
    kind = "1-element" if single else f"{dimensions}-dimensional"
    return f"{kind} {str(dtype).removeprefix('torch.')}"
