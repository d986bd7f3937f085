"""A frozen reference model that is moved towards the trained weights at regular steps.

Gorbatovski et al., "Learn your reference model" (arXiv:2404.09656), equation 2: reference' = mix * policy + (1 - mix) *
reference, every `every_steps` steps. Both models are sharded alike, so each rank mixes its own shards and nothing is
gathered.
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
    """A model that follows the trained one; it has the same parameters and sharding, on any device."""

    model: nn.Module
    every_steps: int
    mix: float
    """Share of the trained weights; 1 copies them."""

    def is_due(self, step: int) -> bool:
        """Return whether the model follows when so many steps are done."""
        return step % self.every_steps == 0

    @torch.no_grad()
    def follow(self, parameters: Mapping[str, nn.Parameter], step: int) -> None:
        """Mix the trained weights in. Each tensor keeps its dtype; sums are in float32 or wider, and rounded once.

        Args:
            parameters: The trained parameters by canonical name.
            step: Number of steps done. In bfloat16 it decides the direction of rounding (`round_evenly`); rounded to
                the nearest number, a small mix would change nothing.
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
