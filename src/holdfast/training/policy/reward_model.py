"""Build a reward model (`kind: model`), either as a full copy on each rank or sharded like the policy.

A sharded model runs on all ranks together. Every rank therefore makes as many forward passes as the rank with the most
texts, with empty batches where it has fewer, and nothing that could raise on a single rank happens between them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.config.verbs.critic import reward_scoring
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.errors import ConfigError, ModelError, PlanError
from holdfast.files import size_words
from holdfast.models.files.configuration import make_trainable, maker, on_meta, reference_buffers, refusals
from holdfast.models.files.conversion import plan_incoming
from holdfast.models.files.loading import StoredSource
from holdfast.models.files.origin import load_tokenizer, locate, read_config
from holdfast.models.files.safetensors_files import StoredTensors
from holdfast.models.files.vision import follow_compute_dtype
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.heads.scorer import (
    LAYER,
    RewardFormat,
    RewardModel,
    TextScorer,
    TextTokens,
    batches_of,
    check_layer,
    not_trained_to_score,
    place_of_score,
    scores_of,
    weight_bytes,
    without_output_layer,
)
from holdfast.models.layers.attention import register_attention
from holdfast.models.layers.family import family_of, positions_of
from holdfast.models.setup.model import Blueprint, choose_attention
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.other_models.reference import build_frozen
from holdfast.training.rollout_memory import free_bytes, free_host_bytes
from holdfast.training.run import Run
from holdfast.types import Batch, Example, Scores


def stored_scorer(config: ModelConfig, base: Path) -> Blueprint:
    """Plan a reward model from its directory, with its outputs, its tokenizer and its padding.

    Args:
        config: Names the directory.
        base: The directory of the YAML.

    Raises:
        ModelError: Files are missing or do not fit, it was not trained to score, or its class scores by another rule.
    """
    register_attention()
    assert config.path is not None
    directory = locate(config.path, config, base, weights=True)
    raw_config = read_config(directory, trust_remote_code=False)
    tokenizer = load_tokenizer(config, base)
    run_config = copy.deepcopy(raw_config)
    make_trainable(run_config, keep_dropout=False)  # without dropout and caches, that is
    make = maker(run_config, trust_remote_code=False, scorer=True)
    with refusals(f"transformers cannot build a {raw_config.model_type} model from its configuration"):
        model, skeleton = (on_meta(make, run_config) for _ in range(2))
        buffers = reference_buffers(make, run_config)
    check_layer(skeleton)
    follow_compute_dtype(model)
    stored = StoredTensors(directory)
    if LAYER not in stored.headers:
        raise not_trained_to_score(directory, LAYER)
    # Some files keep the language model's output layer beside the score, and transformers passes over it.
    incoming = plan_incoming(skeleton, without_output_layer(stored.headers), str(directory))
    family = family_of(skeleton)
    notes: list[str] = []
    packed = choose_attention(model, family, config.attention, notes)
    return Blueprint(
        model,
        skeleton,
        raw_config,
        family,
        tokenizer,
        StoredSource(stored, incoming.conversions, {}),
        buffers,
        incoming.used,
        directory,
        packed,
        tuple(notes),
    )


class ShardedRewardModel:
    """A reward model that is sharded over the ranks.

    Args:
        model: The built and frozen model.
        reading: How samples become its input texts.
        world: This process and its device.
        ranks: A separate process group of the ranks that hold shards.
    """

    def __init__(self, model: PolicyModel, reading: RewardFormat, world: World, ranks: RankGroup) -> None:
        self.model, self.reading = model, reading
        self._device, self._ranks = world.device, ranks

    def scores(self, rows: Sequence[TextTokens]) -> list[float]:
        """Return one number per row; all ranks call this together, each with its own rows, or with none."""
        batches = batches_of(rows, self.reading.batch_size)
        idle: list[list[int]] = [[]] * (max(self._ranks.gather(len(batches))) - len(batches))
        return scores_of(rows, [*batches, *idle], self._numbers)

    @torch.no_grad()
    def _numbers(self, rows: list[TextTokens]) -> list[float]:
        batch = _batch(rows, self.reading.pad, padded=self.model.padded)
        scores = self.model(to_device(batch, self._device))
        assert isinstance(scores, Scores)
        return self.reading.numbers(scores.values)


def _batch(rows: Sequence[TextTokens], pad: int | None, *, padded: bool) -> Batch:
    """Return texts as a batch in which each is scored where transformers reads its score."""
    examples = [
        Example(number, number, np.array(row, np.int64), np.zeros(len(row), np.bool_))
        for number, row in enumerate(rows)
    ]
    batch = pack(examples, [Share(0.0, 0.0)] * len(rows), padded=padded)
    width = batch.tokens.shape[1]
    starts = range(0, width * len(rows), width) if padded else accumulate((len(row) for row in rows[:-1]), initial=0)
    score_indices = [start + place_of_score(row, pad) for start, row in zip(starts, rows, strict=False)]
    return replace(batch, scored=torch.tensor(score_indices, dtype=torch.int64))


def open_reward_model(section: ModelRewardConfig, run: Run) -> TextScorer:
    """Load a reward model, if it has room, and say what a user should know of it; all ranks call this together.

    Args:
        section: Which, and where it lies.
        run: Of the run, which says how a sharded one is split; its ranks serve as long as such a model scores.

    Raises:
        UserError: It cannot be loaded, cannot be sharded, takes more memory than there is now, or would read longer
            texts than it has positions for; the same on all ranks.
    """
    world, ranks = run.world, run.ranks
    with _errors_named(f"reward {section.label}: "):
        needed = ranks.first_rank_first(lambda: _check_room(section, run))
        if section.place == "whole":
            reward_model = ranks.on_all_ranks(lambda: RewardModel(section, run.base, world.device))
            note, summary = (
                reward_model.reading.note,
                f"{size_words(needed)} of weights in {section.dtype}, on every rank",
            )
            scorer: TextScorer = reward_model
        else:
            scorer, bytes_per_rank = _sharded_model(section, run)
            note, summary = scorer.reading.note, f"{size_words(bytes_per_rank)} of weights in {section.dtype} per rank"
    if world.is_first:
        print(f"reward {section.label}: {summary}", flush=True)
        if note is not None:
            print(note, flush=True)
    return scorer


def _sharded_model(section: ModelRewardConfig, run: Run) -> tuple[ShardedRewardModel, int]:
    """Return a sharded model, and the bytes of it that each rank holds."""
    assert isinstance(run.config, GRPOConfig)
    config, ranks = reward_scoring(run.config, section), run.ranks
    origin = ranks.first_rank_first(lambda: stored_scorer(config.model, run.base))
    reading = ranks.on_all_ranks(lambda: _reading(section, origin))
    with _errors_named("", " place: whole leaves this model to transformers, on every rank."):
        model = build_frozen(replace(run, config=config), origin, f"reward {section.label}")
    return ShardedRewardModel(model.module, reading, run.world, ranks), model.plan.shard_bytes


def _reading(section: ModelRewardConfig, origin: Blueprint) -> RewardFormat:
    """Return how a reward model reads texts.

    Raises:
        ModelError: The model has several outputs and none is chosen.
        ConfigError: Texts may be longer than it has positions for: one rank alone would meet such a text.
    """
    assert origin.directory is not None
    positions = positions_of(origin.skeleton)
    if positions is not None and positions.in_a_table and section.max_length > positions.count:
        raise ConfigError(
            f"reward {section.label}: max_length={section.max_length} allows texts that are longer than the "
            f"{positions.count} positions of {origin.family.name} (max_position_embeddings). Lower max_length to "
            f"{positions.count}."
        )
    return RewardFormat(section, origin.tokenizer, origin.original_config, origin.directory)


def _check_room(section: ModelRewardConfig, run: Run) -> int:
    """Return the bytes of a model's weights.

    Raises:
        ModelError: There is no such model.
        ConfigError: They, or this rank's share of them, take more memory than there is now.
    """
    config, world = run.config, run.world
    needed = weight_bytes(section, run.base)
    device, host = (free_bytes(world), "its device"), (free_host_bytes(world), "its share of the machine's memory")
    shard_count = 1 if section.place == "whole" else max(1, world.size // config.parallel.replicate)
    match section.place, "parameters" in config.parallel.offloads:
        case "whole", _:
            memories = [device, host]  # transformers reads it into the machine's memory first
        case "sharded", False:
            memories = [device]
        case _:
            memories = [host]
    share = -(-needed // shard_count)
    for free, memory in memories:
        if share > free:
            holding = (
                "whole on every rank"
                if shard_count == 1
                else f"and each of {shard_count} ranks holds {size_words(share)}"
            )
            raise ConfigError(
                f"reward {section.label}: its weights take {size_words(needed)} in {section.dtype}, {holding}, and "
                f"rank {world.rank} has {size_words(free)} free in {memory}. {_ways_out(section, config, world)}"
            )
    return needed


def _ways_out(section: ModelRewardConfig, config: TrainingConfig, world: World) -> str:
    """Return advice for a reward model that does not fit into memory."""
    ways = []
    shard_count = world.size // config.parallel.replicate
    if section.place == "whole" and shard_count > 1:
        ways.append(f"place: sharded, which leaves each rank a share of 1/{shard_count}")
    if section.place != "offloaded" and world.device.type == "cuda":
        ways.append("place: offloaded, which keeps the shares in host memory")
    ways.append("a smaller model")
    if section.dtype != "bfloat16":
        ways.append("dtype: bfloat16")
    if world.device.type == "cuda":
        ways.append("ranks with more memory")
    else:
        ways.append("fewer ranks on a machine" if section.place == "whole" else "more machines")
    return f"Use {', '.join(ways)}, or serve it and ask it by a reward of kind path or judge."


@contextmanager
def _errors_named(subject: str, advice: str = "") -> Iterator[None]:
    """Say of an error that it is about this model, and what else to do: its keys have other names than the policy's."""
    try:
        yield
    except (ModelError, PlanError) as error:
        raise type(error)(f"{subject}{error}{advice}") from error
