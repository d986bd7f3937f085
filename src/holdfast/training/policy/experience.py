"""Turn scored groups into mini-batches: compute advantages, pack, and add the log-probabilities that the loss needs.

Advantages are computed on groups before packing, so that the order of packing cannot change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.advantages.group import advantages
from holdfast.advantages.turns import turn_advantages
from holdfast.advantages.user import Groups
from holdfast.config.sections.policy import ByCovariance, ClipCovConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.assembly import Layout, assemble
from holdfast.data.batches.candidates import Candidates, SequenceInfo
from holdfast.data.content.model_inputs import going_on
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.layers.attention import pads_branches
from holdfast.objectives.base import Objective
from holdfast.objectives.policy import PolicyGradient, covariances, highest, some_between
from holdfast.objectives.regularisers import entropy_threshold
from holdfast.objectives.surrogates import COVARIANCE_MASK
from holdfast.training.engines import layout_of
from holdfast.training.other_models.reference import scored
from holdfast.training.policy.critic import with_rewards
from holdfast.training.policy.groups import GroupFact, lengths_of, parts_of, returns_of, rewards_of, sample_sizes
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyTraining
from holdfast.training.run import Model
from holdfast.types import Batch, Example, MiniBatch, Prompt, Trajectory, host_value


def batch_columns(config: GRPOConfig) -> dict[str, Any]:
    """Return what every token of a rollout carries, and its type: advantages are as exact as the policy's weights."""
    exact = np.float64 if config.model.dtype == "float64" else np.float32
    columns = {"advantages": exact, "sampler_logprobs": np.float32}
    return columns if config.critic is None else {**columns, "rewards": exact}


def with_advantages(training: PolicyTraining, rollout: Rollout) -> Rollout:
    """Return the rollout with the advantage of every completion on each of its tokens; a critic's come later."""
    if training.critic is not None:
        return with_rewards(rollout, batch_columns(training.config)["rewards"])
    if not rollout.facts:
        return rollout
    with training.run.phase("advantage"):
        advantages = batch_advantages(training, rollout.facts)
        row = {fact.prompt_id: number for number, fact in enumerate(rollout.facts)}
        groups = []
        exact = batch_columns(training.config)["advantages"]
        for group in rollout.groups:
            values = advantages[row[group.prompt.prompt_id]]
            trajectories = tuple(
                replace(trajectory, advantages=on_tokens(trajectory, value).astype(exact))
                for trajectory, value in zip(group.trajectories, values, strict=True)
            )
            groups.append(replace(group, trajectories=trajectories))
    return replace(rollout, groups=tuple(groups))


def on_tokens(trajectory: Trajectory, advantage: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [L], an advantage on every trained token: of its completion, [], or of its turn, [T]."""
    values: NDArray[np.float64] = np.zeros(trajectory.tokens.size)
    if advantage.ndim and trajectory.episode is not None and trajectory.loss_mask.any():
        lengths = trajectory.episode.turn_lengths
        values[trajectory.loss_mask] = np.repeat(advantage[: len(lengths)], lengths)
    elif trajectory.loss_mask.any():
        values[trajectory.loss_mask] = advantage if not advantage.ndim else advantage[0]
    return values


def batch_advantages(training: PolicyTraining, facts: Sequence[GroupFact]) -> NDArray[np.float64]:
    """Return the advantages of all groups of a step, the same on every rank; all ranks call this together.

    They are [P, G], or [P, G, T] where each turn of an episode has its own.

    Raises:
        AdvantageFailed: The user's function makes no advantages of them; on every rank.
    """
    config, ranks = training.config, training.run.ranks
    discount = config.advantage.turn_discount
    if discount is not None:
        return turn_advantages(config.advantage, returns_of(facts, discount, config.environment_weight))
    rewards, lengths = rewards_of(facts), lengths_of(facts)
    reward_parts = {section.label: parts_of(facts, section.label) for section in config.reward}
    if training.user_advantage is not None:
        result = None
        # One rank asks it for all: a function that draws numbers would answer each rank differently.
        with ranks.together():
            if ranks.rank == 0:
                result = training.user_advantage(Groups(rewards, reward_parts, lengths))
        result = ranks.agree(result)
        assert result is not None
        return result
    greedy = np.array([fact.greedy for fact in facts])
    weights = {section.label: section.weight for section in config.reward}
    return advantages(config.advantage, rewards, reward_parts, weights, greedy, lengths)


def pack_rollout(training: PolicyTraining, rollout: Rollout) -> list[MiniBatch]:
    """Return the mini-batches of one pass, each over its own prompts; all ranks call this together.

    Prompts are dealt in draw order, so a mini-batch is the same set of completions at any number of ranks. None is
    empty unless all are: with fewer prompts than mini-batches there are fewer updates.
    """
    model = training.model
    count = max(1, min(training.config.updates.mini_batches, len(rollout.facts)))
    layout = replace(
        layout_of(model, training.evaluation.images),
        columns=batch_columns(training.config),
        constant_length=training.config.most_trained_tokens,
        shares_heads=training.config.rollout.shared_prefix != "off" and not model.module.padded,
        weighs_heads=training.config.rollout.shared_prefix == "auto" and _pads_branches(model),
    )
    with training.run.phase("pack"):
        edges = [number * len(rollout.facts) // count for number in range(count + 1)]
        return [
            _mini_batch(training, rollout, rollout.facts[start:end], layout)
            for start, end in zip(edges[:-1], edges[1:], strict=True)
        ]


def _pads_branches(policy: Model) -> bool:
    if policy.module.padded:
        return True
    return pads_branches(
        policy.blueprint.skeleton, policy.run.world.device.type, getattr(torch, policy.plan.compute_dtype)
    )


def _mini_batch(training: PolicyTraining, rollout: Rollout, facts: Sequence[GroupFact], layout: Layout) -> MiniBatch:
    prompt_ids = {fact.prompt_id for fact in facts}
    own_examples = {
        (group.prompt.prompt_id, index): _example(sample, group.prompt, layout.pad_token, training.evaluation.images)
        for group in rollout.groups
        if group.prompt.prompt_id in prompt_ids
        for index, sample in enumerate(sample for each in group.trajectories for sample in samples_of(each))
    }
    groups = training.config.groups
    sequences = [
        SequenceInfo(
            fact.prompt_id,
            index,
            tokens,
            trained,
            fact.owner,
            completion.tokens - completion.length if fact.prompt_tokens is None else fact.prompt_tokens,
            fact.has_inputs,
        )
        for fact in facts
        for index, (completion, (tokens, trained)) in enumerate(
            (completion, size) for completion in fact.completions for size in sample_sizes(completion, groups)
        )
        if completion.length  # nothing was sampled where an episode failed at its beginning
    ]
    return assemble(Candidates(own_examples, sequences), training.run.ranks, training.config.data, layout)


def samples_of(trajectory: Trajectory) -> list[Trajectory]:
    """Return a completion as the sequences that it is trained as: one, unless a template splits its episode."""
    sizes = () if trajectory.episode is None else trajectory.episode.samples
    if len(sizes) < 2:
        return [trajectory]
    edges = np.cumsum([0, *(tokens for tokens, _ in sizes)]).tolist()
    return [
        replace(
            trajectory,
            tokens=trajectory.tokens[start:end],
            loss_mask=trajectory.loss_mask[start:end],
            sampler_logprobs=trajectory.sampler_logprobs[start:end],
            weights_versions=trajectory.weights_versions[start:end],
            advantages=None if trajectory.advantages is None else trajectory.advantages[start:end],
        )
        for start, end in pairwise(edges)
    ]


def _example(trajectory: Trajectory, prompt: Prompt, pad_token: int, images: ImageSide | str) -> Example:
    assert trajectory.advantages is not None
    tokens, completion_length = trajectory.tokens, trajectory.tokens.size - prompt.tokens.size
    if (
        isinstance(images, ImageSide)
        and completion_length
        and tokens[-1] in images.marks
        and not trajectory.loss_mask[-1]
    ):
        # Nobody trains this completion or reads its end, where a model that counts its images would miss one.
        tokens = np.append(tokens[:-1], pad_token)
    carried = {"advantages": trajectory.advantages, "sampler_logprobs": trajectory.sampler_logprobs}
    return example_of_trajectory(prompt, trajectory, tokens=tokens, per_token=carried)


def example_of_trajectory(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    tokens: NDArray[np.int64] | None = None,
    per_token: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Example:
    """Return a completion as a sequence to train on.

    Args:
        prompt: Of the completion.
        trajectory: The completion.
        tokens: [L] in the place of its own.
        per_token: [L, ...] what its tokens carry besides what they do already.
    """
    completion_length = trajectory.tokens.size - prompt.tokens.size
    return Example(
        sample_id=trajectory.sample_id,
        prompt_id=trajectory.prompt_id,
        tokens=trajectory.tokens if tokens is None else tokens,
        loss_mask=trajectory.loss_mask,
        source=prompt.source,
        per_token={**per_token, **trajectory.per_token},
        model_inputs=trajectory.model_inputs,
        positions=None if prompt.positions is None else going_on(prompt.positions, completion_length),
    )


def with_logprobs(training: PolicyTraining, objective: Objective, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
    """Add the log-probabilities that an objective compares with, and no others; all ranks call this together.

    On-policy without a KL term there is nothing to add, and no forward pass is made.
    """
    result, policy = _compared_with_itself(training, objective, list(mini_batches)), training.model
    if training.reference is not None:
        with training.run.phase("reference"):
            result = [scored(policy, training.reference, mini_batch, "reference_logprobs") for mini_batch in result]
    return result


def _compared_with_itself(
    training: PolicyTraining, objective: Objective, mini_batches: list[MiniBatch]
) -> list[MiniBatch]:
    """Add the policy's log-probabilities before its first update on the rollout, if the objective needs them."""
    section, updates = training.config.objective, training.config.updates.count
    charged = isinstance(objective, PolicyGradient) and objective.charged_to_rewards
    masked = isinstance(objective, PolicyGradient) and objective.needs_entropy_mask
    several = updates > 1 or charged
    if not (several or masked or isinstance(section, ByCovariance)):
        return mini_batches
    policy = training.model
    with training.run.phase("proximal"):
        result = [
            scored(policy, policy.module, mini_batch, "proximal_logprobs", entropy=masked)
            for mini_batch in mini_batches
        ]
    if isinstance(section, ByCovariance):
        result = [
            _with_covariance_mask(training, mini_batch, section, number) for number, mini_batch in enumerate(result)
        ]
    if masked:
        result = [
            _with_entropy_mask(training, mini_batch, training.config.entropy.top_quantile) for mini_batch in result
        ]
    return result if several else [_with_column(mini_batch, "proximal_logprobs", None) for mini_batch in result]


def _with_entropy_mask(training: PolicyTraining, mini_batch: MiniBatch, share: float) -> MiniBatch:
    """Mark the tokens of highest entropy among all of the update's."""
    threshold = entropy_threshold(_gathered_numbers(training, _column(mini_batch, "entropy")), share)
    marks = [batch.per_token["entropy"] >= threshold for batch in mini_batch.micro_batches]
    return _with_column(_with_column(mini_batch, "entropy", None), "entropy_mask", marks)


def _with_covariance_mask(
    training: PolicyTraining, mini_batch: MiniBatch, section: ByCovariance, number: int
) -> MiniBatch:
    """Mark the tokens that are chosen by their covariance among all of the update's."""
    seeds = [training.run.config.seed, training.model.state.step, number]
    drawn = [_priorities(seeds, batch) for batch in mini_batch.micro_batches]
    columns = [_column(mini_batch, "proximal_logprobs"), _column(mini_batch, "advantages"), drawn]
    logprobs, advantages, priorities = (_gathered_numbers(training, column).astype(np.float64) for column in columns)
    values = covariances(logprobs, advantages)
    if isinstance(section, ClipCovConfig):
        selected = some_between(values, priorities, section.share, section.covariance_low, section.covariance_high)
    else:
        selected = highest(values, section.share)
    sizes = training.run.gather_once(sum(priorities_of_batch.size for priorities_of_batch in drawn))
    start, marks = sum(sizes[: training.run.ranks.rank // training.run.config.parallel.context]), []
    for batch in mini_batch.micro_batches:
        end = start + batch.scored.numel()
        mark = torch.zeros_like(batch.loss_mask)
        mark.view(-1)[batch.scored] = torch.as_tensor(selected[start:end], device=mark.device)
        marks.append(mark)
        start = end
    return _with_column(mini_batch, COVARIANCE_MASK, marks)


def _priorities(seeds: list[int], batch: Batch) -> NDArray[np.float64]:
    """Return [N] random numbers that follow from a token's sequence and place alone, whatever packs it lies in."""
    sequence = host_value(batch.sequence_ids.flatten()[batch.scored], "sequences of tokens, for their masks")
    drawn = np.zeros(sequence.size)
    for index, sample_id in enumerate(batch.sample_ids):
        mask = sequence == index
        drawn[mask] = np.random.default_rng([*seeds, sample_id]).random(int(mask.sum()))
    return drawn


def _column(mini_batch: MiniBatch, name: str) -> list[NDArray[Any]]:
    """Return a column of the scored tokens for each micro-batch of this rank; empty for one without scored tokens."""
    reason = f"{name} of tokens, for their masks"
    return [
        host_value(batch.per_token[name].flatten()[batch.scored], reason) if batch.scored.numel() else np.zeros(0)
        for batch in mini_batch.micro_batches
    ]


def _gathered_numbers(training: PolicyTraining, arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([array for of_rank in training.run.gather_once(arrays) for array in of_rank])


def _with_column(mini_batch: MiniBatch, name: str, values: Sequence[Tensor] | None) -> MiniBatch:
    """Return a mini-batch with a column of its tokens added, or removed if it is None."""
    batches = []
    for number, batch in enumerate(mini_batch.micro_batches):
        columns = {key: column for key, column in batch.per_token.items() if key != name}
        batches.append(replace(batch, per_token=columns if values is None else columns | {name: values[number]}))
    return replace(mini_batch, micro_batches=tuple(batches))
