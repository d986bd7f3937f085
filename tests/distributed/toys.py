"""Small modules with the shape of a policy, for rules of sharding that need no language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.config.sections.parallel import ParallelConfig
from holdfast.models.names import POLICY_MODULE, named_parameters, tied_names
from holdfast.parallel.apply import apply_plan
from holdfast.parallel.mesh import World, build_mesh
from holdfast.parallel.plan import ParameterInfo, ShardPlan, plan_shards


class Experts(nn.Module):
    """Two experts of equal shape in one block; each call uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](inputs)  # type: ignore[no-any-return]


class Scale(nn.Module):
    """One weight per element."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight


class Inner(nn.Module):
    """What stands where a policy keeps its language model."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


class Toy(nn.Module):
    """A root that calls its blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.add_module(POLICY_MODULE, Inner(*blocks))

    @property
    def language_model(self) -> Any:
        return self.get_submodule(POLICY_MODULE)

    def forward(self, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
        for block in self.language_model.blocks:
            inputs = block(inputs, *more)
        return inputs

    def upstream_values(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


def shard(world: World, toy: Toy, **options: Any) -> ShardPlan:
    """Plan and apply as a run does."""
    config = ParallelConfig(**options)
    ties = tied_names(toy)
    parameters = [
        ParameterInfo(
            name, tuple(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad, ties.get(name, ())
        )
        for name, value in named_parameters(toy).items()
    ]
    blocks = [f"blocks.{index}" for index in range(len(toy.language_model.blocks))]
    mesh = build_mesh(config, world)
    plan = plan_shards(parameters, ["", *blocks], blocks, config, shard=mesh.size(1), device="cpu")
    apply_plan(toy, plan, mesh, nn.Module.compile)
    return plan
