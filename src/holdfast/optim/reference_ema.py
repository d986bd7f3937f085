"""A frozen model that follows the weights of the trained one from time to time, shard by shard.

Gorbatovski et al., "Learn your reference model" (arXiv:2404.09656), equation 2: reference' = mix * policy + (1 - mix) *
reference, every so many steps. Nothing is gathered: both are split alike, and each rank mixes what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.optim.lowbit import SPREAD, round_evenly
from holdfast.parallel.shards import local_part, sharded_parameters


@dataclass(frozen=True)
class FollowingModel:
    """A model that follows another one of the same parameters, in the same shards, on any device."""

    model: nn.Module
    every_steps: int
    mix: float
    """Share of the trained weights; 1 copies them."""

    def is_due(self, step: int) -> bool:
        """Return whether the model follows when so many steps are done."""
        return step % self.every_steps == 0

    @torch.no_grad()
    def follow(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        """Mix the trained weights in. Each tensor keeps its dtype; sums are in float32 at least, and rounded once.

        Args:
            parameters: The trained ones, by name.
            step: Steps that are done; in bfloat16 it says which way is rounded, or small mixes would move nothing.
        """
        followers = sharded_parameters(self.model)
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue  # it is the same in both
            follower, weight = local_part(followers[name].detach()), local_part(parameter.detach())
            wide = torch.promote_types(follower.dtype, torch.float32)
            mixed = torch.lerp(follower.to(wide), weight.to(follower.device, wide), self.mix)
            if self.mix < 1:
                round_evenly(follower, mixed, step // self.every_steps * SPREAD[0])
            else:
                follower.copy_(mixed)
