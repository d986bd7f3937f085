"""Plans the step of a policy. A few tokens are decoded with the largest cache, and training has full-length rows."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from holdfast.config.sections.engine import LocalEngineConfig, VLLMEngineConfig
from holdfast.config.sections.rollout import EngineConfig, SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.features.plan.counting.kinds import CACHE, RESUME, ROLLOUT_WEIGHTS
from holdfast.features.plan.counting.memory import Ledger, follow_model
from holdfast.features.plan.execution.steps import PlannedStep, reference_of
from holdfast.models.names import named_parameters
from holdfast.parallel.copies import copies_of
from holdfast.recipes.grpo import learn_from
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.local.block_attention import InPlace
from holdfast.rollout.local.blocks import Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE, BlockCache
from holdfast.rollout.local.graphs import CHECKED_STEPS
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.engines import open_engine
from holdfast.training.policy.critic import add_critic
from holdfast.training.policy.experience import pack_rollout, with_advantages
from holdfast.training.policy.made_up import made_up_rollout
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import (
    CRITIC,
    PolicyEvaluation,
    PolicyTraining,
    Sampler,
    offloaded,
    restored_afterwards,
)
from holdfast.training.rollout_memory import (
    check_copy_fits,
    completion_bytes,
    free_beside,
    limit_engine,
    longest_row,
)
from holdfast.training.run import Model
from holdfast.training.setup.begin import Live
from holdfast.training.setup.losses import policy_objective
from holdfast.training.setup.model import image_side_of
from holdfast.types import Finish, Group, Prompt, Trajectory


def policy_step(step: PlannedStep, config: GRPOConfig) -> Callable[[], object]:
    """Return what samples for, scores for and updates a policy."""
    training = _run_of(step, config)
    section, group = config.rollout, config.rollout.group_size
    decode = sampling_of(
        step,
        section,
        config.longest_context,
        rows=config.data.batch_size,
        group=group,
        sampler=training.evaluation.sampler,
    )
    if config.environment is not None:
        step.notes.append("rollout: the processes of environments are left out")

    rollout = _rollout(step, config)

    def make() -> object:
        with restored_afterwards(training.model):
            with offloaded(training):
                decode()
            compared = with_advantages(training, rollout)
            with _disable_current_modes():  # splitting rows over ranks asks for numbers, which packs have
                # One mini-batch of two micro-batches stands for all of a rollout.
                mini_batch = step.shortened(pack_rollout(training, compared)[0])
            return learn_from(training, compared, [mini_batch])

    return make


def _run_of(step: PlannedStep, config: GRPOConfig) -> PolicyTraining:
    model, objective = step.model, policy_objective(config, step.run)
    model.temperature = config.rollout.temperature
    sampler = _sampler_of(step, config.rollout)
    evaluation = PolicyEvaluation(
        model=model,
        objective=objective,
        sampler=sampler,
        score=lambda _: [],
        images=image_side_of(config, model.blueprint),
        prompt_sets=(),
    )
    reference = None
    if config.reference.kind != "none" and config.kl.coefficient > 0:
        reference = reference_of(step, config.reference)
    stream: Any = None
    training = PolicyTraining(
        evaluation=evaluation, stream=stream, source_names=(), observers=(), identity={}, reference=reference
    )
    if config.critic is not None:
        add_critic(training, config.critic, Live(), step.build)
        critic = training.companions[CRITIC]
        follow_model(step.ledger, critic.module)
        step.companions[CRITIC] = critic
    _deal_memory(step, sampler, config.rollout, config.longest_context)
    return training


def _rollout(step: PlannedStep, config: GRPOConfig) -> Rollout:
    """Return completions that all are as long as one may be, those of every rank on this one."""
    length, size = config.longest_context + config.rollout.max_new_tokens, config.rollout.group_size
    prompt = max(1, length - config.most_trained_tokens)  # without an environment, exactly the prompt
    tokens, mask = np.zeros(length, np.int64), np.arange(length) >= prompt
    zeros, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
    groups = [
        Group(
            Prompt(number, tokens[:prompt], "", {}),
            tuple(
                Trajectory(
                    prompt_id=number,
                    sample_id=number * 2**20 + index,
                    seed=0,
                    temperature=config.rollout.temperature,
                    tokens=tokens,
                    loss_mask=mask,
                    sampler_logprobs=zeros,
                    weights_versions=versions,
                    finish=Finish.LENGTH,
                    completion="",
                    reward=None,
                )
                for index in range(size)
            ),
        )
        for number in range(config.data.batch_size)
    ]
    return made_up_rollout(groups, config, step.run.ranks, of_all_ranks=True)


def sampling_of(
    step: PlannedStep, section: EngineConfig, prompt: int, *, rows: int, group: int, sampler: Sampler | None = None
) -> Callable[[], object]:
    """Return what decodes this rank's completions.

    Args:
        step: Of the run.
        section: How.
        prompt: Tokens of each prompt.
        rows: Prompts over all ranks.
        group: Completions of each.
        sampler: Of the run, where it has one.
    """
    if sampler is None:
        sampler = _sampler_of(step, section)
        _deal_memory(step, sampler, section, prompt)
    local = sampler.engine
    if not isinstance(local, InProcessEngine):
        step.notes.append(f"rollout: {_left_out(section)}")
        return lambda: None
    own_rows = -(-rows // step.run.ranks.size)
    slots = _rows_with_blocks(local, section, prompt, group)
    at_once, completions = max(1, min(own_rows, slots // group)), min(group, slots)
    engine = PlannedEngine(local, step.ledger, section)
    requests = [Request(number, np.zeros(prompt, np.int64), tuple(range(completions))) for number in range(at_once)]

    def make() -> None:
        step.kept = []
        with step.run.phase("rollout"):
            engine.publish(sampler, step)
            kept = engine.decode(requests)
            sampler.release(step.model)
        step.kept = kept if _stays(step, local, kept) else []

    return make


def _stays(step: PlannedStep, engine: InProcessEngine, kept: Sequence[Tensor]) -> bool:
    """Return whether keys and values keep their memory while a step trains, as `settle_kept` decides in a run.

    Nothing is kept before a step has shown what training takes, nor where the engine's weights are given back.
    """
    copies = copies_of(step.model.module)
    is_held = not step.model.plan.sharded and (copies is None or bool(copies.tensors))
    if not is_held or engine._kept.recorder is None or not step.training_peak:
        return False
    return step.training_peak + sum(tensor.nbytes for tensor in kept) <= step.room


def _rows_with_blocks(engine: InProcessEngine, section: EngineConfig, prompt: int, group: int) -> int:
    """Return how many completions of the longest are decoded together: `rollout.rows`, or fewer for want of blocks."""
    limit, blocks = engine.block_limit, Blocks(BLOCK_SIZE)
    if limit is None:
        return section.rows
    prompts = [(prompt, group)] * -(-section.rows // group)
    most = lambda rows: blocks.most(prompts, section.max_new_tokens + CHECKED_STEPS, rows)  # noqa: E731 - a key
    return max(1, bisect_right(range(1, section.rows + 1), limit, key=most))


class PlannedSampler(Sampler):
    """A sampler whose engine tries no optional forms: its tensors hold no numbers to compare."""

    def settle_forms(self, model: Model) -> None:
        """Leave every form as it is."""


class _ExternalEngine:
    """Replaces an engine that runs outside of the ranks; implements `RolloutEngine` of `rollout/engine.py`."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Ignore the weights."""

    def submit(self, requests: Sequence[object], sampling: SamplingConfig) -> None:
        """Sample nothing."""

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:  # noqa: ARG002 - it takes no time
        """Return nothing."""
        return []

    def sleep(self) -> bool:
        """Have nothing to give back."""
        return False

    def close(self) -> None:
        """Have nothing to close."""


def _sampler_of(step: PlannedStep, section: EngineConfig) -> Sampler:
    """Return the sampler of a run; no server is asked, and no code of the user's is run."""
    if not isinstance(section.engine, LocalEngineConfig):
        return PlannedSampler(_ExternalEngine())
    return PlannedSampler(open_engine(step.model, section))


def _deal_memory(step: PlannedStep, sampler: Sampler, section: EngineConfig, context: int) -> None:
    """Give our own decoding the blocks that the run would take; where memory has no room, the table says so."""
    model, engine = step.model, sampler.engine
    if not isinstance(section.engine, LocalEngineConfig):
        return
    if section.copy_gib is not None:
        check_copy_fits(model, section.copy_gib, in_process=isinstance(engine, InProcessEngine))
    if isinstance(engine, InProcessEngine):
        free = free_beside(model, companions=step.companions.values())
        if completion_bytes(model, longest_row(model, section, context)) > free:
            free = sys.maxsize
        limit_engine(engine, model, section, context, free)


def _left_out(section: EngineConfig) -> str:
    """Say what a plan leaves out where the ranks do not decode themselves."""
    engine = section.engine
    if isinstance(engine, VLLMEngineConfig):
        return (
            f"servers of vLLM sample ({len(engine.url)}), on devices of their own: their memory and time are left out, "
            f"and so are pushes of weights to them, which take up to two buckets ({2 * engine.bucket_mib:g} MiB) and "
            "the largest tensor of rank 0's host memory"
        )
    if isinstance(engine, LocalEngineConfig):
        return "transformers' generate samples, and is not executed; its copy and cache are left out"
    return f"rollout.engine: {engine.kind} samples, and what it takes is left out"


class PlannedEngine:
    """An engine that decodes only at the lengths at which a completion takes the most memory.

    Args:
        engine: The engine of the run.
        ledger: Counter of memory.
        section: The `rollout` section of the run.
    """

    def __init__(self, engine: InProcessEngine, ledger: Ledger, section: EngineConfig) -> None:
        self._engine, self._ledger, self._section = engine, ledger, section
        if engine.in_place is not None:
            engine.in_place = InPlace(lambda _: None, planned=True)

    def publish(self, sampler: Sampler, step: PlannedStep) -> None:
        """Give the engine its weights, each counted as such when it has come."""
        take = self._engine.update_weights
        parameters = named_parameters(self._engine._replica.model)

        def counted(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                yield name, tensor
                if name in parameters:
                    self._ledger.name([parameters[name].data], ROLLOUT_WEIGHTS)

        self._engine.update_weights = lambda tensors, version: take(counted(tensors), version)  # type: ignore[method-assign]
        try:
            sampler.publish(step.model)
            # The first publish gives the copy its memory, in parameters that were not there before.
            copy = named_parameters(self._engine._replica.model).values()
            self._ledger.name([parameter.data for parameter in copy], ROLLOUT_WEIGHTS)
        finally:
            self._engine.update_weights = take  # type: ignore[method-assign]

    @torch.no_grad()
    def decode(self, requests: Sequence[Request]) -> list[Tensor]:
        """Draw the first tokens of all, then one with the least and one with the most in the cache.

        Returns:
            The memory of keys and values.
        """
        most, length = self._section.max_new_tokens, len(requests[0].prompt)
        self._engine.submit([], self._section)
        replica = self._engine._replica
        with replica.for_few_rows(), counted_cache(self._ledger), self._engine.decoding(None, planned=True) as decoding:
            decoding.submit(requests)
            decoding.begin_rows()
            if most > 1:
                if self._engine.in_place is not None and self._engine.in_place.agrees is None:
                    before, self._ledger.phase = self._ledger.phase, RESUME  # once in a process
                    decoding.prepare(1)
                    decoding.on_device.compare_attention()
                    self._ledger.phase = before
                decoding.step_at(length)
            if most > 2:  # noqa: PLR2004 - the first token, the next and the last
                decoding.step_at(length + most - 1)
            return [tensor for pair in decoding.on_device.cache.pairs.values() for tensor in pair]


@contextlib.contextmanager
def counted_cache(ledger: Ledger) -> Iterator[None]:
    """Count the keys and values of rows as such within the block."""
    grow, memory = BlockCache.grow, BlockCache.memory_like

    def counted_grow(cache: BlockCache, capacity: int) -> None:
        with ledger.scope(CACHE):
            grow(cache, capacity)

    def counted_memory(cache: BlockCache, states: Tensor) -> Tensor:
        with ledger.scope(CACHE):
            return memory(cache, states)

    BlockCache.grow = counted_grow  # type: ignore[method-assign,assignment]
    BlockCache.memory_like = counted_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BlockCache.grow = grow  # type: ignore[method-assign]
        BlockCache.memory_like = memory  # type: ignore[method-assign]
