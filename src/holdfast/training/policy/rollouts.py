"""From prompts to scored groups, and a completion as one sequence with its prompt.

A completion's seed is made of the run's seed, the step, the prompt and its place in the group, so a rollout that was
broken off is sampled again exactly. What all ranks know of all groups, and which of them are trained on, is in
`training/policy/groups.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.batches.stream import PromptBatch
from holdfast.data.content.image_files import ImageFiles
from holdfast.errors import RunStopped
from holdfast.rewards.base import Scored
from holdfast.rollout.engine import Request, RequestImages, Sampled, generate
from holdfast.rollout.sampling import mixed
from holdfast.training.policy.ahead import CompletionsAhead
from holdfast.training.policy.groups import (
    GroupFact,
    select,
    share_facts,
    trained_part,
    warn_of_unknown_reward,
    with_baselines,
    without_dropped,
)
from holdfast.training.policy.run import PolicyEvaluation, PolicyTraining, Sampler
from holdfast.training.policy.scoring import score_groups
from holdfast.training.run import Model, Run, StepAbandoned
from holdfast.types import Finish, Group, Prompt, Trajectory

_MESSAGES = 3
"""Failed rewards that are named per step; all are counted."""


@dataclass(frozen=True)
class Rollout:
    """The groups of a step that are trained on."""

    groups: tuple[Group, ...]
    """This rank's."""
    facts: tuple[GroupFact, ...]
    """Of all ranks' groups, by prompt."""
    sampled: tuple[GroupFact, ...]
    """Likewise, those that were left out included."""
    counted: Mapping[str, float]
    """What reading the prompts counted."""
    messages: tuple[str, ...]
    """What went wrong with rewards, over all ranks."""
    left_out: tuple[Group, ...] = ()
    """This rank's that are not trained on."""


def drawn_prompts(training: PolicyTraining, rounds: Sequence[Rollout]) -> Iterator[PromptBatch]:
    """Yield the prompts of each round, until there are enough groups, or no prompts are left.

    Args:
        training: The policy's.
        rounds: The rounds that are done; the caller adds one after each batch.
    """
    groups = training.config.groups
    for _ in range(groups.max_rounds if groups.flat == "resample" else 1):
        rows = _rows(training, sum(len(rollout.facts) for rollout in rounds))
        if rows <= 0:
            return
        with training.run.phase("data"):
            batch = training.stream.next(training.model.state.step, rows)
        if batch is None:
            return
        yield batch


@contextmanager
def prompts_put_back(training: PolicyTraining) -> Iterator[None]:
    """Put the stream of prompts back where the block began, if the step is abandoned within it."""
    before = training.stream.state()
    try:
        yield
    except StepAbandoned:
        training.stream.load_state(before)
        raise


def tell_rollout(training: PolicyTraining, rollout: Rollout) -> None:
    """Leave messages about rewards and prompts for the journal.

    Raises:
        RunStopped: No completion had a reward for too many steps in a row; on all ranks.
    """
    messages = training.run.log.messages
    messages += [f"warning: {message}" for message in rollout.messages[:_MESSAGES]]
    messages += warn_of_unknown_reward(rollout.sampled, training.config.groups.between)
    messages += _plain_prompts(training, rollout)
    _refuse_unscored(training, rollout)


def begin_next_rollouts(training: PolicyTraining) -> None:
    """Have completions of the next steps sampled ahead, if the run does, and the prompts behind them read."""
    if training.ahead is not None:
        _sample_ahead(training, training.ahead)
    batches = training.config.rollout.max_staleness + 1  # nobody has read the last of these
    training.stream.begin(training.model.state.step + batches, _rows(training, 0), batches)


def _sample_ahead(training: PolicyTraining, ahead: CompletionsAhead) -> None:
    """Have completions of the next steps sampled, from the weights that this step is about to change."""
    present, total, pushed = training.model.state.step, training.model.total_steps, False
    for batches in range(1, training.config.rollout.max_staleness + 1):
        step = present + batches
        if total is not None and step >= total:
            break
        with training.run.phase("data"):
            batch = training.stream.read_ahead(step, _rows(training, 0), batches)
        if batch is None:
            break
        with training.run.phase("rollout"):
            if not pushed:
                training.evaluation.sampler.publish(training.model)
                pushed = True
            seeds, with_rows = seeds_of(training, batch, step), training.evaluation.episodes is not None
            requests = requests_of(training.run, batch.own_prompts, seeds, with_rows=with_rows)
            training.run.ranks.on_all_ranks(partial(ahead.begin, step, requests))
    if ahead.restored_count:
        training.run.log.messages += ahead.tell_restored(sum(training.run.ranks.gather(ahead.taken_count)))


def _rows(training: PolicyTraining, group_count: int) -> int:
    """Return how many prompts the next round draws, given the number of groups sampled so far."""
    groups = training.config.groups
    excess = groups.oversample if groups.flat == "resample" else 1.0
    return math.ceil(
        round((training.config.data.batch_size - group_count) * excess, 6)
    )  # 10 * 1.1 is a little above 11


def _plain_prompts(training: PolicyTraining, rollout: Rollout) -> list[str]:
    """Say once that a chat model is asked in plain text: its reward may stay low for no other reason."""
    plain = rollout.counted.get("data/without_chat_template", 0)
    if training.model.state.step > 0 or not plain:
        return []
    if all(source.synthetic is not None for source in training.config.data.all_sources()):
        return []  # rows of our own are not questions to an assistant
    return [
        f"note: {plain:.0f} prompts of this step are plain text, which goes to the model without the tokenizer's chat "
        "template. To ask a model that follows instructions, set data.columns: {instruction: prompt}, or write "
        "prompts as messages; `holdfast data preview` shows what is asked"
    ]


def _refuse_unscored(training: PolicyTraining, rollout: Rollout) -> None:
    """Stop a run whose rewards say nothing at all, step after step: it would end as it began, and seem to have trained.

    Raises:
        RunStopped: No completion had a reward for too many steps in a row; on all ranks.
    """
    scored = any(math.isfinite(completion.reward) for fact in rollout.sampled for completion in fact.completions)
    state = training.model.state
    state.unscored_in_a_row = 0 if scored else state.unscored_in_a_row + 1
    if state.unscored_in_a_row >= training.config.rewards.max_unscored_steps:
        why = f" The last reason: {rollout.messages[0]}" if rollout.messages else ""
        raise RunStopped(
            f"Not one completion could be scored in {state.unscored_in_a_row} steps in a row, the last of them "
            f"step {state.step + 1}, so nothing was learned. Mend the reward, or the environment; "
            f"rewards.max_unscored_steps is how long a run waits.{why}"
        )


def round_of(
    training: PolicyTraining,
    batch: PromptBatch,
    groups: Sequence[Group],
    facts: Sequence[GroupFact],
    scored: Sequence[Scored],
) -> Rollout:
    """Return the groups of a round that are trained on, and the others; all ranks call this together."""
    config = training.config
    trimmed = [without_dropped(fact, config.groups) for fact in facts]
    weights = {reward.label: reward.weight for reward in config.reward}
    selected = select(trimmed, config.groups, config.advantage, weights, config.environment_weight)
    selected_ids = {fact.prompt_id for fact in selected}
    trimmed = [fact for fact in trimmed if fact.prompt_id in selected_ids]
    own_groups = tuple(trained_part(group, config.groups) for group in groups if group.prompt.prompt_id in selected_ids)
    left_out = tuple(group for group in groups if group.prompt.prompt_id not in selected_ids)
    rank_messages = training.run.ranks.gather([item.message for item in scored if item.message][:8])
    messages = tuple(line for lines in rank_messages for line in lines)
    return Rollout(own_groups, tuple(trimmed), tuple(facts), batch.metrics, messages, left_out)


def seeds_of(training: PolicyTraining, batch: PromptBatch, step: int) -> dict[int, tuple[int, ...]]:
    """Return the seed of each completion of this rank's prompts, at any number of ranks the same."""
    config = training.config.rollout
    seed, indices = training.config.seed if config.seed is None else config.seed, range(config.group_size)
    ids = [prompt.prompt_id for prompt in batch.own_prompts]
    return {prompt_id: tuple(mixed(seed, step, prompt_id, index) for index in indices) for prompt_id in ids}


def requests_of(
    run: Run, prompts: Sequence[Prompt], seeds: Mapping[int, tuple[int, ...]], *, with_rows: bool = False
) -> list[Request]:
    """Return what an engine is asked for; with their rows, of which episodes are made, if that is asked for."""
    files = ImageFiles(run.config.data.image_dir, run.base)
    return [
        Request(
            prompt.prompt_id,
            prompt.tokens,
            seeds[prompt.prompt_id],
            prompt.model_inputs,
            prompt.positions,
            None if prompt.images is None else RequestImages(prompt.prompt_id, prompt.images, files),
            prompt.row if with_rows else None,
        )
        for prompt in prompts
    ]


def with_greedy(
    training: PolicyTraining, prompts: Sequence[Prompt], facts: Sequence[GroupFact], scored: Sequence[Scored]
) -> tuple[list[GroupFact], list[Scored]]:
    """Complete every prompt once more, greedily; return what that earns, and what scoring said of all completions."""
    sampling = training.config.rollout.model_copy(update={"temperature": 0.0})
    policy = training.evaluation
    groups = sample(policy, prompts, sampling, {prompt.prompt_id: (0,) for prompt in prompts})
    rewarded, greedy_scored = score_groups(policy, groups)
    facts_with_greedy = with_baselines(
        facts, share_facts(training.run.ranks, rewarded, greedy_scored), training.config.groups
    )
    return facts_with_greedy, [*scored, *greedy_scored]


def merged_rounds(rounds: Sequence[Rollout], batch_size: int) -> Rollout:
    """Return the first `batch_size` groups of all rounds; those in excess are left out."""
    facts = sorted((fact for rollout in rounds for fact in rollout.facts), key=lambda fact: fact.prompt_id)[:batch_size]
    selected_ids = {fact.prompt_id for fact in facts}
    groups = [group for rollout in rounds for group in (*rollout.groups, *rollout.left_out)]
    return Rollout(
        tuple(group for group in groups if group.prompt.prompt_id in selected_ids),
        tuple(facts),
        tuple(sorted((fact for rollout in rounds for fact in rollout.sampled), key=lambda fact: fact.prompt_id)),
        _summed_counts(rounds),
        tuple(line for rollout in rounds for line in rollout.messages),
        tuple(group for group in groups if group.prompt.prompt_id not in selected_ids),
    )


def _summed_counts(rounds: Sequence[Rollout]) -> dict[str, float]:
    counted: dict[str, float] = {}
    for rollout in rounds:
        for name, value in rollout.counted.items():
            counted[name] = counted.get(name, 0.0) + value
    return counted | {"rollout/rounds": float(len(rounds))}


def sample(
    policy: PolicyEvaluation,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    seeds: Mapping[int, tuple[int, ...]],
    ahead: CompletionsAhead | None = None,
) -> list[Group]:
    """Return this rank's prompts with single answers or episodes; arguments as of `sample_groups`.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
    """
    if policy.episodes is not None:
        return policy.episodes.sample(policy, prompts, sampling, seeds, ahead)
    return sample_groups(policy.model, policy.sampler, prompts, sampling, seeds, ahead)


def sample_groups(
    model: Model,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    seeds: Mapping[int, tuple[int, ...]],
    ahead: CompletionsAhead | None = None,
) -> list[Group]:
    """Complete this rank's prompts; all ranks call this together, and wait for each other only at its end.

    Args:
        model: The policy.
        sampler: Has its engine.
        prompts: To complete.
        sampling: How.
        seeds: By prompt id, one per completion.
        ahead: Where these completions may be on their way.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
    """
    run = model.run
    with run.phase("rollout"):
        if ahead is None or not ahead.is_begun(model.state.step):
            sampler.publish(model)
        requests = requests_of(run, prompts, seeds)
        # What ends an engine outside of this process for one rank ends the step on all.
        sampled = run.ranks.on_all_ranks(lambda: _collected(model, sampler, requests, sampling, ahead))
        aborted = any(completion.finish is Finish.ABORT for completion in sampled)
        everyone = run.ranks.gather((aborted, sum(completion.unscored for completion in sampled)))
        if any(gone for gone, _ in everyone):
            raise StepAbandoned
        if ahead is not None:
            ahead.end(model.state.step)
        if unscored := sum(count for _, count in everyone):
            run.log.messages.append(
                f"warning: the engine tells no log-probability of {unscored} sampled tokens; nothing corrects them"
            )
        refuse_nan(model, _with_nan(sampled))
        return _groups(prompts, sampled, seeds, sampling, model.blueprint.tokenizer)


def _groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sampled],
    seeds: Mapping[int, tuple[int, ...]],
    sampling: SamplingConfig,
    tokenizer: Any,
) -> list[Group]:
    of_id = {prompt.prompt_id: prompt for prompt in prompts}
    by_prompt: dict[int, list[Trajectory]] = {prompt_id: [] for prompt_id in of_id}
    for completion in sampled:
        seed = seeds[completion.request_id][completion.place]
        trajectory = trajectory_of(of_id[completion.request_id], completion, seed, sampling, tokenizer)
        by_prompt[completion.request_id].append(trajectory)
    return [Group(prompt, tuple(by_prompt[prompt.prompt_id])) for prompt in prompts]


def _collected(
    model: Model,
    sampler: Sampler,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    ahead: CompletionsAhead | None,
) -> list[Sampled]:
    interrupted = model.run.interrupted
    if ahead is None:
        return generate(sampler.engine, requests, sampling, interrupted)
    return ahead.begin(model.state.step, requests).collect(interrupted)


def _with_nan(sampled: Sequence[Sampled]) -> set[int]:
    """Return the ids of prompts with a completion whose log-probabilities are NaN; unscored ones are NaN anyway."""
    return {
        completion.request_id
        for completion in sampled
        if np.count_nonzero(np.isnan(completion.logprobs)) > completion.unscored
    }


def refuse_nan(model: Model, prompt_ids: Collection[int]) -> None:
    """Stop a run whose logits are NaN, since nothing can be sampled from them.

    Args:
        model: The policy.
        prompt_ids: Prompts of this rank whose sampled log-probabilities are NaN.

    Raises:
        RunStopped: There is one on some rank; raised on all ranks.
    """
    ids = sorted(number for rank_ids in model.run.ranks.gather(set(prompt_ids)) for number in rank_ids)
    if ids:
        raise RunStopped(
            f"The policy's logits are not finite (NaN) for {len(ids)} prompts of step {model.state.step + 1}, the "
            f"first one prompt {ids[0]}, so nothing can be sampled from it. Its weights are as the last step left "
            "them: look at grad_norm and loss in metrics.jsonl, and go on from an earlier checkpoint with a lower "
            "optim.lr, or with parallel.compute_dtype: float32."
        )


def trajectory_of(prompt: Prompt, sampled: Sampled, seed: int, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    """Return a prompt and its completion as one sequence."""
    size, completion_size = prompt.tokens.size, sampled.tokens.size
    logprobs = np.concatenate([np.zeros(size, np.float32), sampled.logprobs])
    versions = np.concatenate(
        [np.full(size, -1, np.int32), np.full(completion_size, sampled.weights_version, np.int32)]
    )
    for start, version in sampled.segments:
        versions[size + start :] = version
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample_id=prompt.prompt_id * 2**20 + sampled.place,
        seed=seed,
        temperature=sampling.temperature,
        tokens=np.concatenate([prompt.tokens, sampled.tokens]),
        loss_mask=np.arange(size + completion_size) >= size,
        sampler_logprobs=logprobs,
        weights_versions=versions,
        finish=sampled.finish,
        completion=tokenizer.decode(sampled.tokens.tolist(), skip_special_tokens=True),
        model_inputs=prompt.model_inputs,
    )
