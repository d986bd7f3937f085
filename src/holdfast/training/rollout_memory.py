"""The memory that rollouts take on a rank: a copy of the weights, and blocks of keys and values.

The number of blocks decides which completions are decoded together, and so the order of sums. It is chosen once, when
all models of a run are in their places, and stands in `TrainState.cache_blocks` from then on: a run that is continued
has the same if there is room.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from torch import nn

from holdfast.config.sections.engine import LocalEngineConfig
from holdfast.config.sections.rollout import EngineConfig
from holdfast.errors import ConfigError
from holdfast.files import size_words
from holdfast.models.check.shrink import layers_in
from holdfast.models.layers.attention import attention_layers, head_sizes
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part
from holdfast.rollout.engine import RolloutEngine
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE
from holdfast.rollout.local.graphs import CHECKED_STEPS
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.run import Model

_GIB = 2**30
_SHARE = 0.5
"""Part of the memory that is free at the start that keys and values may take; training needs the rest."""


def deal_memory(
    engine: RolloutEngine,
    model: Model,
    rollout: EngineConfig,
    context: int,
    *,
    companions: Iterable[Model] = (),
    trains: bool = True,
) -> None:
    """Give an engine of the ranks its part of the memory that is free when all models of a run are in their places.

    All ranks call this together, and all of them raise what any of them raises.

    Args:
        engine: From `open_engine`.
        model: The policy.
        rollout: How it is sampled.
        context: Tokens that a completion may follow.
        companions: Other models that will have an optimizer's state.
        trains: The policy will have one; without it there is more room for keys and values.

    Raises:
        ConfigError: Memory has no room.
    """
    if not isinstance(rollout.engine, LocalEngineConfig):
        return
    ranks = model.run.ranks
    with ranks.together():
        check_copy_fits(model, rollout.copy_gib, in_process=isinstance(engine, InProcessEngine))
    if isinstance(engine, InProcessEngine):
        free = free_beside(model, companions=companions, trains=trains)
        with ranks.together():
            refuse_no_room(model, longest_row(model, rollout, context), free)
        limit_engine(engine, model, rollout, context, free)


def limit_engine(engine: InProcessEngine, model: Model, rollout: EngineConfig, context: int, free: int) -> None:
    """Give our own decoding blocks of keys and values; all ranks call this together.

    Args:
        engine: From `open_engine`.
        model: The policy.
        rollout: How it is sampled.
        context: Tokens that a completion may follow.
        free: Bytes of this rank that sampling may take.
    """
    ranks, tokens = model.run.ranks, longest_row(model, rollout, context)
    engine.block_limit = min(ranks.gather(cache_blocks(model, rollout.rows, tokens, free)))
    engine.block_room = min(ranks.gather(blocks_with_room(model, free)))
    engine.submit([], rollout)  # how its steps are tried before the first rollout
    engine.longest = tokens  # a row that was paused begins with what it has drawn
    engine.block_bytes = block_bytes(model)
    engine.takes_turns = getattr(model.run.config, "environment", None) is not None


def longest_row(model: Model, rollout: EngineConfig, context: int) -> int:
    """Return the most tokens of a completion and what it follows, completions of evaluations included."""
    sampling = getattr(model.run.config.evaluation, "sampling", None)
    return context + max(rollout.max_new_tokens, (sampling and sampling.max_new_tokens) or 0)


_STATE_SIZES = {"adamw_bf16": 3.0, "adamw_8bit": 0.51, "sgd": 1.0}
"""Bytes of an optimizer's state for each byte of the parameters that it updates; two for all other optimizers."""


def free_beside(model: Model, *, companions: Iterable[Model] = (), trains: bool = True) -> int:
    """Return the bytes of this rank's device that are left for keys and values; negative where there are none.

    Args:
        model: The policy.
        companions: Further models that have an optimizer.
        trains: The policy has an optimizer.
    """
    return free_bytes(model.run.world) - _expected_bytes(model, trains=trains, others=companions)


def _expected_bytes(model: Model, *, trains: bool, others: Iterable[Model] = ()) -> int:
    """Return what this rank's device will hold while completions are sampled, beside what it holds now.

    That is the copy of the weights, matrices laid out for decoding, and the states of optimizers. Gradients are freed
    before. Arguments as of `free_beside`.
    """
    copied = copy_bytes(model) + layout_bytes(model)
    return copied + sum(map(_state_bytes, [*([model] if trains else []), *others]))


def _state_bytes(model: Model) -> int:
    """Return what an optimizer's state will take on the device, unless it is there already or in host memory."""
    config = model.run.config
    residency = getattr(config, "residency", None)
    offloaded = "optimizer" in config.parallel.offloads or (residency is not None and residency.optimizer == "host")
    has_state = any(getattr(getattr(model, "optimizer", None), "state", {}).values())
    if has_state or (offloaded and model.run.world.device.type != "cpu"):
        return 0
    trained = sum(local_part(value).nbytes for value in model.module.parameters() if value.requires_grad)
    return int(_STATE_SIZES.get(config.optim.kind, 2.0) * trained)


def limit_blocks(engine: RolloutEngine, model: Model) -> None:
    """Let an engine that has its weights, and that no run keeps, have as many blocks as there is memory for now."""
    if isinstance(engine, InProcessEngine):
        room = blocks_with_room(model, free_bytes(model.run.world))
        engine.block_limit = max(1, min(model.run.ranks.gather(room)))


def block_bytes(model: Model) -> int:
    """Return the most that keys and values of a block take, in all layers; those that models compress take less."""
    text, dtype = model.blueprint.skeleton.config.get_text_config(), getattr(torch, model.plan.compute_dtype)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    sizes = max(sum(sizes) for sizes in head_sizes(model.blueprint.skeleton))
    recurrent = model.blueprint.family.recurrent
    layers = attention_layers(model.blueprint.skeleton) if recurrent else layers_in(model.blueprint.skeleton)
    return int(max(1, layers) * BLOCK_SIZE * heads * sizes * dtype.itemsize)


def blocks_with_room(model: Model, free: int) -> int:
    """Return how many blocks this rank has memory for, of so many bytes that are free."""
    return int(max(0, free) * _SHARE) // block_bytes(model)


def cache_blocks(model: Model, rows: int, tokens: int, free: int) -> int:
    """Return how many blocks this rank has: those of all rows at their longest, or what there is memory for.

    Those of one row it has in any case. Where layers are recurrent it is all that there is memory for, since rows have
    states there too.

    Args:
        model: The policy.
        rows: Most completions that are decoded together.
        tokens: Most tokens of a completion and what it follows.
        free: Bytes that are free.
    """
    row = _blocks_of_row(tokens)
    blocks = max(row, blocks_with_room(model, free))
    return blocks if model.blueprint.family.recurrent else min(blocks, row * rows)


def completion_bytes(model: Model, tokens: int) -> int:
    """Return the bytes of keys and values of a completion that has so many tokens with what it follows."""
    return _blocks_of_row(tokens) * block_bytes(model)


def refuse_no_room(model: Model, tokens: int, free: int) -> None:
    """Refuse a policy for whose longest completion there is no memory.

    Args:
        model: The policy.
        tokens: Most tokens of a completion and what it follows.
        free: Bytes that are free, less those that weights and the optimizer's state will take; negative if those
            alone find no room.

    Raises:
        ConfigError: There is no room for one completion.
    """
    needed = completion_bytes(model, tokens)
    if needed > free:
        room = f"has {size_words(free)}" if free >= 0 else f"lacks {size_words(-free)}"
        raise ConfigError(
            f"rollout: keys and values of one completion take {size_words(needed)} where it and its prompt have "
            f"{tokens} tokens (data.max_length), and rank {model.run.world.rank} {room} beside the weights, "
            "their copy for sampling and the optimizer's state. Set fewer tokens, use a smaller model, more ranks or "
            "devices with more memory; `holdfast plan` lists what takes memory, and what to turn."
        )


def _blocks_of_row(tokens: int) -> int:
    """Return the blocks of a row of so many tokens, with one more for the copy of a block that a group shares."""
    return Blocks(BLOCK_SIZE).needed(tokens + CHECKED_STEPS) + 1


def settle_blocks(model: Model, engine: InProcessEngine, room: int) -> None:
    """Give an engine the blocks of its run: what it was continued with if there is room, else its own.

    Args:
        model: The policy, whose state notes them.
        engine: As it was opened, or as this function left it.
        room: Blocks that every rank has memory for.
    """
    opened, saved = engine.block_limit, model.state.cache_blocks
    if opened is None or saved == opened:
        return
    blocks = min(saved, room) if saved else opened
    engine.block_limit = model.state.cache_blocks = blocks
    if not model.run.world.is_first or model.blueprint.family.recurrent:
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
            f"{size_words(blocks * block_bytes(model))}; completions for which there is none wait",
            flush=True,
        )


_MARGIN = 1.25
"""Factor by which training may take more memory than in the steps before."""
_SAMPLING = ("rollout", "recording", "evaluation", "load")
"""Phases in which completions are sampled."""


class TrainingMemory:
    """What training has taken at most beside what decoding kept, as far as steps of this process have shown."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._peak = self._kept = self.most = 0

    def note(self, updates: int, peak: int) -> bool:
        """Take over a peak of the steps so far.

        Args:
            updates: Of the policy.
            peak: Bytes that were allocated at most while it was not sampled from.

        Returns:
            Whether an update was among the steps.
        """
        self._first = updates if self._first is None else min(self._first, updates)
        if peak > self._peak:
            self._peak, self.most = peak, max(self.most, peak - self._kept)
        return updates > self._first

    def has_room(self, kept: int, whole: int) -> bool:
        """Whether so many of all bytes can be kept while a step trains; what follows is measured beside them."""
        fits = self.most * _MARGIN + kept <= whole
        self._kept = kept if fits else 0
        return fits


def settle_kept(model: Model, engine: InProcessEngine, training: TrainingMemory) -> None:
    """Give back what an engine keeps between rollouts, until a step has shown that training has room beside it.

    Args:
        model: The policy.
        engine: What samples from it, behind a rollout.
        training: Of the policy; what it knows is brought up to date.
    """
    device = model.run.world.device
    if not training.note(model.state.updates, model.run.log.peaks.outside(*_SAMPLING)):
        engine.free()
    elif not training.has_room(engine.kept_bytes, torch.cuda.memory_allocated(device) + free_bytes(model.run.world)):
        engine.free(f"{size_words(engine.kept_bytes)} have no room beside training")


def check_copy_fits(model: Model, budget_gib: float | None, *, in_process: bool) -> None:
    """Refuse rollouts that would run out of memory in step 1; else say what they take.

    Args:
        model: The policy, on its device already.
        budget_gib: Most that sampling may take; None for what is free now.
        in_process: Whether our own decoding samples, and not transformers' `generate`.

    Raises:
        ConfigError: Sampling takes more.
    """
    dtype = model.plan.compute_dtype
    copied = copy_bytes(model)
    laid_out = layout_bytes(model) if in_process else 0
    needed = copied + laid_out
    world, breakdown = model.run.world, _memory_breakdown(copied, laid_out, dtype)
    budget = free_bytes(world) if budget_gib is None else int(budget_gib * _GIB)
    if needed > budget:
        has_limit = budget_gib is not None
        limit = f"may take {budget_gib:g} GiB (rollout.copy_gib)" if has_limit else f"has {size_words(budget)} free"
        advice = "" if dtype == "bfloat16" else ", set parallel.compute_dtype: bfloat16"
        room = "devices with more memory" if world.device.type == "cuda" else "fewer ranks on a machine"
        raise ConfigError(
            f"rollout: sampling takes {size_words(needed)} on every rank, {breakdown}, and rank "
            f"{world.rank} {limit}. Use a smaller model{advice}, or use {room}."
        )
    if world.is_first:
        print(f"rollouts: {breakdown}, on every rank", flush=True)


def copy_bytes(model: Model) -> int:
    """Return what a rank's copy takes besides the policy itself, of which sampling reads what has the right dtype."""
    dtype: torch.dtype = getattr(torch, model.plan.compute_dtype)
    plan = model.plan
    unsharded = not plan.sharded or (plan.shard == 1 and not plan.cpu_offload)
    if unsharded and model.run.config.model.lora is None:
        numbers = sum(value.numel() for value in model.module.parameters() if value.dtype != dtype)
    else:
        numbers = sum(value.numel() for value in model.blueprint.skeleton.parameters())
    return int(numbers) * dtype.itemsize


def layout_bytes(model: Model) -> int:
    """Return what decoding takes on the CPU for matrices that it lays out anew while the first ones stay."""
    if model.run.world.device.type != "cpu":
        return 0
    layers = [layer for layer in model.blueprint.skeleton.modules() if type(layer) is nn.Linear]
    dtype: torch.dtype = getattr(torch, model.plan.compute_dtype)
    return sum(int(layer.weight.numel()) for layer in layers) * dtype.itemsize


def free_bytes(world: World) -> int:
    """Return the memory that is free on this rank's device; of a host's, its share among the ranks there."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return int(torch.cuda.mem_get_info(world.device)[0]) + cached
    return free_host_bytes(world)


def free_host_bytes(world: World) -> int:
    """Return this rank's share of the memory that is free on its machine."""
    return int(psutil.virtual_memory().available) // (world.local_size or 1)


def _memory_breakdown(copied: int, laid_out: int, dtype: str) -> str:
    weights = f"a copy of the weights, {size_words(copied)} in {dtype}" if copied else "the policy's own weights"
    return f"{weights}, and {size_words(laid_out)} of matrices laid out for decoding" if laid_out else weights
