"""How many blocks of keys and values our own decoding may have.

The number decides which completions are decoded together, and so the order of sums. It is chosen once, when a run
starts, and stands in `TrainState.cache_blocks` from then on: a run that is continued has the same, whatever is free.
"""

from __future__ import annotations

import torch

from holdfast.config.sections.rollout import EngineConfig
from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.models.check.shrink import layers_in
from holdfast.models.layers.attention import head_sizes
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE
from holdfast.rollout.local.graphs import CHECKED_STEPS
from holdfast.training.run import ShardedModel

_SHARE = 0.5
"""Part of the memory that is free at the start that keys and values may take; training needs the rest."""


def block_bytes(sharded: ShardedModel) -> int:
    """Return the most that keys and values of a block take, in all layers; those that models compress take less."""
    text, dtype = sharded.origin.skeleton.config.get_text_config(), getattr(torch, sharded.plan.compute_dtype)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    sizes = max(sum(sizes) for sizes in head_sizes(sharded.origin.skeleton))
    return int(layers_in(sharded.origin.skeleton) * BLOCK_SIZE * heads * sizes * dtype.itemsize)


def cache_blocks(sharded: ShardedModel, rollout: EngineConfig, context: int, free: int) -> int:
    """Return how many blocks this rank can have: those of all rows at their longest, or what there is memory for.

    Args:
        sharded: The policy.
        rollout: How it is sampled.
        context: Tokens that a completion may follow.
        free: Bytes that are free.

    Raises:
        ConfigError: There is no room for one completion.
    """
    row = Blocks(BLOCK_SIZE).needed(context + rollout.max_new_tokens + CHECKED_STEPS) + 1
    room = int(free * _SHARE) // block_bytes(sharded)
    if room < row:
        raise ConfigError(
            f"rollout: keys and values of one completion take {size_words(row * block_bytes(sharded))} where it and "
            f"its prompt have {context + rollout.max_new_tokens} tokens (data.max_length), and rank "
            f"{sharded.setting.world.rank} has {size_words(int(free * _SHARE))} for them, half of what is free. Set "
            "fewer, use a smaller model, or devices with more memory."
        )
    if room < row * rollout.rows and sharded.setting.world.is_first:
        print(
            f"rollouts: keys and values have room for {room * BLOCK_SIZE:,} tokens, "
            f"{size_words(room * block_bytes(sharded))}; completions for which there is none wait",
            flush=True,
        )
    return min(room, row * rollout.rows)
