"""Context parallelism: ranks that share every packed row (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank of a context group has an equal span of the row's positions. Everything but attention works position by
position and needs no other span. Before attention an all-to-all exchanges spans of all heads for the whole row of some
heads; after it another exchanges back. Both are permutations, so the backward pass of each is the other. Gradients of
parameters need nothing more: the loss is the sum over ranks of the losses of their spans, and FSDP2 sums gradients.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.mesh import World, context_mesh


def join_context(config: TrainingConfig, world: World, origin: Blueprint, policy: PolicyModel) -> None:
    """Give a policy the group of ranks that share its rows, if there is one; all ranks call this together.

    Raises:
        ConfigError: Its rows cannot be shared.
    """
    if config.parallel.context > 1:
        _refuse(config.parallel.context, origin, policy)
        policy.context = ContextGroup(context_mesh(config.parallel, world).get_group("context"))
        if world.is_first:
            print(f"every packed row is shared by {config.parallel.context} ranks (parallel.context)", flush=True)
        if world.is_first and world.local_size and world.local_size % config.parallel.context:
            print(
                f"note: this machine has {world.local_size} ranks, so some groups of parallel.context="
                f"{config.parallel.context} cross machines, and exchange queries, keys and values over the network.",
                flush=True,
            )


def _refuse(context: int, origin: Blueprint, policy: PolicyModel) -> None:
    name, key = origin.family.name, f"parallel.context: {context}"
    text: Any = origin.skeleton.config.get_text_config()
    if policy.padded:
        reason = origin.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(f"{key} splits packed rows, and {name} is not packed: {reason}. Leave parallel.context out.")
    heads = int(text.num_attention_heads)
    if heads % context:
        divisors = ", ".join(str(number) for number in range(2, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"{key} gives each rank as many attention heads, and {name} has {heads}. Set parallel.context to one of "
            f"{divisors}, and launch.ranks to a multiple of it."
        )


class ContextGroup:
    """The ranks that share this rank's rows; implements `models.layers.attention.RowExchange`.

    Args:
        group: Their process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange [1, heads, span, size] of this rank's span for [1, heads / ranks, T, size] of the whole row."""
        _, heads, span, size = tensor.shape
        received = _AllToAll.apply(tensor.reshape(self.size, heads // self.size, span, size), self._group)  # type: ignore[no-untyped-call]
        whole: Tensor = received.transpose(0, 1).reshape(1, heads // self.size, self.size * span, size)
        return whole

    def keys_to_heads(self, tensor: Tensor) -> Tensor:
        """Do the same with keys or values, repeated as few times as the ranks need to have as many heads each."""
        repeats = self.size // gcd(tensor.shape[1], self.size)
        return self.to_heads(tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1))

    def to_span(self, tensor: Tensor) -> Tensor:
        """Exchange [1, T, heads / ranks, size] for [1, span, heads, size]: the inverse of `to_heads`, transposed."""
        _, width, heads, size = tensor.shape
        span = width // self.size
        received = _AllToAll.apply(tensor.reshape(self.size, span, heads, size), self._group)  # type: ignore[no-untyped-call]
        of_span: Tensor = received.transpose(0, 1).reshape(1, span, self.size * heads, size)
        return of_span

    def head_values(self, tensor: Tensor) -> Tensor:
        """Return the values of this rank's heads of [heads]."""
        return tensor.chunk(self.size)[self.rank]

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group, differentiable: a loss on any of its ranks reaches the terms of all."""
        total: Tensor = _Sum.apply(tensor, self._group)  # type: ignore[no-untyped-call]
        return total


class _AllToAll(torch.autograd.Function):
    """Send the r-th part of dimension 0 to rank r. It transposes ranks and parts, and so is its own inverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.forward(ctx, gradient, ctx.group), None
