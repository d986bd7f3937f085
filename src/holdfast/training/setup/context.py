"""Join a model's ranks into context groups, after refusing what they cannot share."""

from __future__ import annotations

from typing import Any

from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.context import ContextGroup
from holdfast.parallel.mesh import World, context_mesh


def join_context(config: TrainingConfig, world: World, origin: Blueprint, policy: PolicyModel) -> None:
    """Give a policy the group of ranks that share its rows, if there is one; all ranks call this together.

    Raises:
        ConfigError: Its rows cannot be shared.
    """
    if config.parallel.context > 1:
        _refuse(config.parallel.context, origin, policy)
        mesh = context_mesh(config.parallel, world)
        assert mesh is not None
        policy.context = ContextGroup(mesh.get_group("context"))
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
