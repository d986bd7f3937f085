"""Optimizers whose state is quantised, a model for them, and functions that rank pools run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast import checkpoint
from holdfast.checkpoint.format.snapshot import outline, take
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.config.sections.optim import (
    AdamW8bitConfig,
    OptimConfig,
    UserOptimizerConfig,
)
from holdfast.optim.state import collect
from holdfast.optim.wrapped import placed_like
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.setup.optimizers import optimizer_of
from tests.distributed.toys import Toy, shard
from tests.optim.own import Momentum
from tests.settings import setting_of


class Scaled(Tensor):
    """Eight-bit integers and a scale, behind the face of a float tensor."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, values: Tensor) -> Scaled:
        scale = values.abs().max().clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def values(self) -> Tensor:
        return self.numbers * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_plain, args), **{key: _plain(value) for key, value in (kwargs or {}).items()})


def _plain(value: Any) -> Any:
    return value.values() if isinstance(value, Scaled) else value


class ScaledMomentum(Momentum):
    """Momentum whose average is kept in eight bits, sharded as the parameter is."""

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight, gradient = local_part(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        before = local_of(state["average"]).values() * group["share"] if "average" in state else 0.0
        average = before + gradient
        state["average"] = placed_like(parameter, Scaled.of(average), parameter.shape)
        weight.sub_(group["lr"] * average)


CONFIGS: dict[str, OptimConfig] = {
    "8bit": AdamW8bitConfig(lr=0.01, weight_decay=0.1),
    "8bit, 68 rows": AdamW8bitConfig(lr=0.01),
    "4bit": UserOptimizerConfig(path="torchao.optim:AdamW4bit", lr=0.01, weight_decay=0.1),
    "fp8": UserOptimizerConfig(path="torchao.optim:AdamWFp8", lr=0.01, weight_decay=0.1),
    "torchao": UserOptimizerConfig(path="torchao.optim:AdamW8bit", lr=0.01),
}


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let torchao's own optimizers, which compile their step for minutes on a CPU, run it as it is."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def local_of(value: Any) -> Any:
    """Return the local tensor in its own class."""
    return getattr(value, "_local_tensor", value)


class Block(nn.Module):
    """Matrices whose shards on 2 and 4 ranks end where blocks do or not, and a bias too small to be quantised."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.side = nn.Linear(128, middle, bias=False)
        self.down = nn.Linear(middle, 64, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.side(self.up(inputs).tanh()))  # type: ignore[no-any-return]


def built(world: World, kind: str, *, seed: int = 0, middle: int = 66) -> tuple[Toy, Optimizer]:
    """Return a sharded toy and an optimizer, as a run makes it."""
    with torch.random.fork_rng(), uncompiled():
        torch.manual_seed(seed)
        toy = Toy(Block(68 if kind.endswith("68 rows") else middle))
        shard(world, toy)
        if kind == "own":
            return toy, ScaledMomentum(list(toy.parameters()), 0.01)
        return toy, optimizer_of(setting_of(CONFIGS[kind], world), sharded_parameters(toy))


def steps(world: World, toy: Toy, optimizer: Optimizer, numbers: Sequence[int]) -> None:
    """Make updates whose numbers depend on the step alone; gradients are live afterwards."""
    for number in numbers:
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        (toy(inputs).square().mean() / world.size).backward()
        with uncompiled():
            optimizer.step()


def contents(toy: Toy, optimizer: Optimizer) -> dict[str, Any]:
    """Return hash and dtype of every whole tensor, parts of quantised ones too, and the classes of these."""
    parameters = sharded_parameters(toy)
    found: dict[str, Any] = {name: hash_tensor(full_tensor(value.data)) for name, value in parameters.items()}
    state = collect(optimizer, parameters)
    for name, keys in state.tensors.items():
        for key, value in keys.items():
            local = local_part(value)
            # gloo gathers no 8-bit floats; their bytes are what is compared.
            bytes_ = placed_like(value, local.view(torch.uint8) if local.dtype.itemsize == 1 else local, value.shape)
            found[f"{name} {key}"] = (hash_tensor(full_tensor(bytes_)), str(value.dtype))
    for name, records in state.wrapped.items():
        for key, record in records.items():
            live = local_of(next(each for one, each in parameters.items() if one == name))
            kept = local_of(next(value[key] for one, value in optimizer.state.items() if local_of(one) is live))
            found[f"{name} {key}"] = (type(kept).__name__, record.shape, record.dtype)
    return found


def straight(world: World, kind: str, run: str) -> dict[str, Any]:
    """Rehearse, train, save in the middle, and go on; return what was there then and at the end."""
    toy, optimizer = built(world, kind)
    untouched = contents(toy, optimizer)
    with uncompiled():
        rehearsed = checkpoint.rehearse(run, toy, optimizer, keep=1).outline
    same = contents(toy, optimizer) == untouched and not optimizer.state
    steps(world, toy, optimizer, range(3))
    alike = outline(take(toy, optimizer)) == rehearsed
    checkpoint.save(f"{run}/step-00000003", toy, optimizer)
    middle = contents(toy, optimizer)
    steps(world, toy, optimizer, range(3, 6))
    return {"untouched": same, "rehearsed": alike, "middle": middle, "end": contents(toy, optimizer)}


def resumed(world: World, kind: str, run: str, numbers: Sequence[int] = range(3, 6)) -> dict[str, Any]:
    """Load into another model, in which gradients are live, and go on."""
    toy, optimizer = built(world, kind, seed=1)
    toy(torch.ones(2, 64)).sum().backward()
    checkpoint.load(f"{run}/step-00000003", toy, optimizer)
    middle = contents(toy, optimizer)
    steps(world, toy, optimizer, numbers)
    return {"middle": middle, "end": contents(toy, optimizer)}


def loaded_again(world: World, kind: str, run: str, other: str) -> None:
    """Load at this number of ranks, and save at it."""
    toy, optimizer = built(world, kind, seed=1)
    checkpoint.load(f"{run}/step-00000003", toy, optimizer)
    checkpoint.save(f"{other}/step-00000003", toy, optimizer)


def moments(optimizer: Optimizer, toy: Toy) -> dict[str, Tensor]:
    """Return the numbers that quantised state stands for, whole, by parameter and key."""
    names = {id(value): name for name, value in sharded_parameters(toy).items()}
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value.ndim:
                local = local_of(value)
                numbers = torch.empty(local.shape).copy_(local)
                found[f"{names[id(parameter)]} {key}"] = full_tensor(placed_like(parameter, numbers, parameter.shape))
    return found


def numbers_of(world: World, kind: str, run: str, cast: Sequence[str]) -> dict[str, Any]:
    """Load with a declared cast; return what state stands for then, and what was noted and recorded."""
    toy, optimizer = built(world, kind, seed=1)
    found = checkpoint.load(f"{run}/step-00000003", toy, optimizer, declared=Declared(cast=cast))
    kinds = {type(local_of(value)).__name__ for state in optimizer.state.values() for value in state.values()}
    now = moments(optimizer, toy)
    steps(world, toy, optimizer, [3])
    return {"numbers": now, "notes": found.notes, "kinds": kinds}


def try_to_load(world: World, kind: str, run: str, middle: int = 66) -> dict[str, Any]:
    """Return the error of a load, and whether it left everything as it was."""
    toy, optimizer = built(world, kind, seed=1, middle=middle)
    steps(world, toy, optimizer, [0])
    before = contents(toy, optimizer)
    try:
        checkpoint.load(f"{run}/step-00000003", toy, optimizer)
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return {"error": (type(error).__name__, str(error)), "same": contents(toy, optimizer) == before}
    return {"error": None, "same": False}


def save_it(world: World, run: str, kind: str, middle: int, call: str) -> None:
    """Rehearse or save with an optimizer that may refuse."""
    toy, optimizer = built(world, kind, middle=middle)
    if call == "rehearse":
        with uncompiled():
            checkpoint.rehearse(run, toy, optimizer, timeout_minutes=1.0)
        return
    steps(world, toy, optimizer, [0])
    checkpoint.save(f"{run}/step-00000001", toy, optimizer, timeout_minutes=1.0)
