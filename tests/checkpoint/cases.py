"""Functions that rank pools run: a small sharded model with every kind of parameter and state, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.checkpoint.format.verification import verified_manifest
from holdfast.checkpoint.keep.choose import ResumeChoice, newest_verified
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.checkpoint.place.storage import Storage
from holdfast.models.names import canonical_name
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from tests.distributed.toys import Scale, Toy, shard


class Block(nn.Module):
    """A trained matrix, a frozen one, one that nothing ever calls, a single number, and a counter."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.trained = nn.Linear(width, width, bias=True)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.unused = nn.Linear(width, 3, bias=False)
        self.single = Scale(1, torch.float32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.single(self.trained(inputs) + self.frozen(inputs)) + inputs  # type: ignore[no-any-return]


def build(world: World, *, seed: int = 0, width: int = 5, blocks: int = 2) -> Toy:
    """Return a sharded toy with random weights, the same on any number of ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        toy = Toy(*(Block(width) for _ in range(blocks)))
    shard(world, toy)
    return toy


def optimizer_of(toy: nn.Module, kind: str = "adamw", **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer over the trained parameters."""
    trained = [parameter for parameter in toy.parameters() if parameter.requires_grad]
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind]
    defaults = {"lr": 0.05} | ({"momentum": 0.9} if kind == "sgd" else {})
    return made(trained, **(defaults | options))  # type: ignore[arg-type]


def step(world: World, toy: Toy, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Make an update whose numbers depend on the step alone, and return the loss."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(6, 5, generator=generator)
    loss = toy(inputs).square().mean() / world.size
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach() * world.size)


def zero_everything(toy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Overwrite parameters, buffers and the optimizer's state in place."""
    with torch.no_grad():
        for tensor in [*toy.parameters(), *toy.buffers()]:
            tensor.zero_()
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()


def refused_save(pools: Any, place: Path, function: Any, *arguments: Any) -> str:
    """Let two ranks save into an empty place; both raise the same SaveFailed and leave nothing. Return its words."""
    one, two = pools(2).errors(function, str(place / "step-00000001"), *arguments)
    assert one == two
    assert one[0] == "SaveFailed"
    assert list(place.iterdir()) == []
    return str(one[1])


def mixed_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """Make state of other dtypes than the parameters', as low-precision optimizers have."""
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
        state["exp_avg_sq"] = state["exp_avg_sq"].to(torch.float64)
        state["note"] = (torch.bfloat16, 3, "text")


def contents(toy: Toy, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return hash, dtype and shape of every tensor, whole, and of every value of the optimizer's state."""
    found: dict[str, Any] = {}
    parameters = sharded_parameters(toy)
    for name, parameter in parameters.items():
        found[name] = _described(parameter.data)
    for name, buffer in toy.named_buffers():
        found[canonical_name(name)] = _described(buffer)
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        name = next(name for name, value in parameters.items() if value is parameter)
        for key, value in state.items():
            found[f"{name}/{key}"] = _described(value) if isinstance(value, Tensor) else value
    return found


def _described(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    whole = full_tensor(tensor)
    return hash_tensor(whole), str(whole.dtype), tuple(whole.shape)


def save_after(world: World, path: str, steps: int, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Train, save, and return what was saved."""
    os.environ.update(variables or {})
    toy = build(world)
    optimizer = optimizer_of(toy)
    for number in range(steps):
        step(world, toy, optimizer, number)
    if steps:
        mixed_dtypes(optimizer)
    checkpoint.save(path, toy, optimizer, extra={"steps": steps}, rank_extra=("rank", world.rank))
    return contents(toy, optimizer)


def load_into_other(world: World, path: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Load into another model, in which gradients are live, and return what is there then."""
    os.environ.update(variables or {})
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    toy(torch.ones(2, 5)).sum().backward()
    restored = checkpoint.load(path, toy, optimizer)
    return contents(toy, optimizer) | {"extra": restored.extra, "rank_extra": restored.rank_extra}


def newest_whole(storage: Storage, ranks: RankGroup, **options: Any) -> ResumeChoice | None:
    """Return the newest checkpoint whose files have their hashes; nothing is loaded."""
    return newest_verified(storage, ranks, use=lambda name, _: verified_manifest(storage, name, ranks), **options)
