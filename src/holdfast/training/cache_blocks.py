"""How many blocks of keys and values our own decoding may have.

The number decides which completions are decoded together, and so the order of sums. It is chosen once, when a run
starts, and stands in `TrainState.cache_blocks` from then on: a run that is continued has the same if there is room.
"""

from __future__ import annotations

import torch

from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.models.check.shrink import layers_in
from holdfast.models.layers.attention import attention_layers, head_sizes
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE
from holdfast.rollout.local.graphs import CHECKED_STEPS
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.run import ShardedModel

_SHARE = 0.5
"""Part of the memory that is free at the start that keys and values may take; training needs the rest."""


def block_bytes(sharded: ShardedModel) -> int:
    """Return the most that keys and values of a block take, in all layers; those that models compress take less."""
    text, dtype = sharded.origin.skeleton.config.get_text_config(), getattr(torch, sharded.plan.compute_dtype)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    sizes = max(sum(sizes) for sizes in head_sizes(sharded.origin.skeleton))
    recurrent = sharded.origin.family.recurrent
    layers = attention_layers(sharded.origin.skeleton) if recurrent else layers_in(sharded.origin.skeleton)
    return int(max(1, layers) * BLOCK_SIZE * heads * sizes * dtype.itemsize)


def blocks_with_room(sharded: ShardedModel, free: int) -> int:
    """Return how many blocks this rank has memory for, of so many bytes that are free."""
    return int(max(0, free) * _SHARE) // block_bytes(sharded)


def cache_blocks(sharded: ShardedModel, rows: int, tokens: int, free: int) -> int:
    """Return how many blocks this rank has: those of all rows at their longest, or what there is memory for.

    Those of one row it has in any case. Where layers are recurrent it is all that there is memory for, since rows have
    states there too.

    Args:
        sharded: The policy.
        rows: Most completions that are decoded together.
        tokens: Most tokens of a completion and what it follows.
        free: Bytes that are free.
    """
    row = _blocks_of_row(tokens)
    blocks = max(row, blocks_with_room(sharded, free))
    return blocks if sharded.origin.family.recurrent else min(blocks, row * rows)


def completion_bytes(sharded: ShardedModel, tokens: int) -> int:
    """Return the bytes of keys and values of a completion that has so many tokens with what it follows."""
    return _blocks_of_row(tokens) * block_bytes(sharded)


def refuse_no_room(sharded: ShardedModel, tokens: int, free: int) -> None:
    """Refuse a policy for whose longest completion there is no memory.

    Args:
        sharded: The policy.
        tokens: Most tokens of a completion and what it follows.
        free: Bytes that are free, less those that weights and the optimizer's state will take; negative if those
            alone find no room.

    Raises:
        ConfigError: There is no room for one completion.
    """
    needed = completion_bytes(sharded, tokens)
    if needed > free:
        room = f"has {size_words(free)}" if free >= 0 else f"lacks {size_words(-free)}"
        raise ConfigError(
            f"rollout: keys and values of one completion take {size_words(needed)} where it and its prompt have "
            f"{tokens} tokens (data.max_length), and rank {sharded.setting.world.rank} {room} beside the weights, "
            "their copy for sampling and the optimizer's state. Set fewer tokens, use a smaller model, more ranks or "
            "devices with more memory; `holdfast plan` lists what takes memory, and what to turn."
        )


def _blocks_of_row(tokens: int) -> int:
    """Return the blocks of a row of so many tokens, with one more for the copy of a block that a group shares."""
    return Blocks(BLOCK_SIZE).needed(tokens + CHECKED_STEPS) + 1


def settle_blocks(sharded: ShardedModel, engine: InProcessEngine, room: int) -> None:
    """Give an engine the blocks of its run: what it was continued with if there is room, else its own.

    Args:
        sharded: The policy, whose state notes them.
        engine: As it was opened, or as this function left it.
        room: Blocks that every rank has memory for.
    """
    opened, saved = engine.block_limit, sharded.state.cache_blocks
    if opened is None or saved == opened:
        return
    blocks = min(saved, room) if saved else opened
    engine.block_limit = sharded.state.cache_blocks = blocks
    if not sharded.setting.world.is_first or sharded.origin.family.recurrent:
        return  # blocks of models with recurrent layers are all that there is room for, whatever rows need
    if saved > room:
        print(
            f"rollouts: the run had {saved:,} blocks of keys and values, and there is room for {room:,} now: "
            "completions may differ in rounding from those of a run that was not interrupted",
            flush=True,
        )
    elif saved and saved < opened:
        print(
            f"rollouts: the run keeps the {saved:,} blocks of keys and values that it began with, though it could have "
            f"{opened:,} now, so that its sums stay as they were; completions for which there is none wait, whatever "
            "rollout.rows is. Only a new run has more.",
            flush=True,
        )
    if blocks >= room:
        print(
            f"rollouts: keys and values have room for {blocks * BLOCK_SIZE:,} tokens, "
            f"{size_words(blocks * block_bytes(sharded))}; completions for which there is none wait",
            flush=True,
        )
