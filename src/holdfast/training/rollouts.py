"""From prompts to scored groups, and what every rank must know of all of them.

A completion's seed is made of the run's seed, the step, the prompt and its place in the group, so a rollout that was
broken off is sampled again exactly. Which groups are trained on is decided from facts that all ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.advantages.group import without_advantages
from holdfast.config.policy import AdvantageConfig
from holdfast.config.rollout import BetweenConfig, GroupsConfig, SamplingConfig
from holdfast.data.prompts import PromptBatch
from holdfast.errors import RunStopped
from holdfast.rewards.base import Progress, Sample, Scored
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.sampling import mixed
from holdfast.training.policy import PolicyEvaluation, PolicyRun, SamplingEvaluation, progress_of, publish, rest
from holdfast.training.resting import resting
from holdfast.training.run import StepAbandoned
from holdfast.training.trajectories import trajectory_of
from holdfast.types import Finish, Group, Prompt, Trajectory

_MESSAGES = 3
"""Failed rewards that are named per step; all are counted."""


class CompletionFact(NamedTuple):
    """What all ranks know of one completion."""

    reward: float
    """NaN if it was not scored."""
    parts: Mapping[str, float | None]
    length: int
    tokens: int
    """With its prompt."""
    finish: Finish
    fault: str | None
    drop: str | None
    metrics: Mapping[str, float] = MappingProxyType({})
    """What rewards told beside their numbers."""
    nll: float = math.nan
    """Minus the log-probability of its tokens under the distributions they were drawn from, summed, in nats."""


class GroupFact(NamedTuple):
    """What all ranks know of one group."""

    prompt_id: int
    owner: int
    """The rank that holds it."""
    completions: tuple[CompletionFact, ...]
    greedy: float = math.nan
    """Reward of the greedy completion, where the advantage needs one; NaN if it was not scored."""
    greedy_fault: str | None = None
    has_inputs: bool = False
    """Whether its prompt brings inputs only the model understands."""


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


def next_rollout(run: PolicyRun) -> Rollout | None:
    """Sample and score the groups of the next step; None when the prompts have ended.

    Raises:
        StepAbandoned: This rank, or another one, was asked to stop; the same on all ranks.
    """
    with resting(run):
        found = _rounds(run)
        rest(run)
    if not found:
        return None
    groups_config, wanted = run.config.groups, run.config.data.batch_size
    rollout = _joined(found, wanted)
    run.said += [f"warning: {message}" for message in rollout.messages[:_MESSAGES]]
    run.said += _unknown_part(rollout.sampled, groups_config.between)
    _refuse_unscored(run, rollout)
    return rollout


def _rounds(run: PolicyRun) -> list[Rollout]:
    groups_config, wanted = run.config.groups, run.config.data.batch_size
    before = run.stream.state()
    found: list[Rollout] = []
    kept = 0
    try:
        rounds, excess = 1, 1.0
        if groups_config.flat == "resample":
            rounds, excess = groups_config.max_rounds, groups_config.oversample
        for _ in range(rounds):
            rows = math.ceil(round((wanted - kept) * excess, 6))  # 10 * 1.1 is a little more than 11
            with run.phase("data"):
                batch: PromptBatch | None = run.stream.next(run.state.step, rows)
            if batch is None:
                break
            found.append(_one_round(run, batch))
            kept += len(found[-1].facts)
            if kept >= wanted:
                break
    except StepAbandoned:
        run.stream.load_state(before)
        raise
    return found


def _unknown_part(facts: Sequence[GroupFact], between: BetweenConfig | None) -> list[str]:
    """Say so where groups are chosen by what no completion has; its first word alone is checked before step 1."""
    known = sorted({name for fact in facts for completion in fact.completions for name in completion.parts})
    if between is None or not known or between.reward in known:
        return []
    return [
        f"warning: groups.between.reward: no completion of this step has {between.reward}, so every group is left out; "
        f"they have {', '.join(known)}"
    ]


def _refuse_unscored(run: PolicyRun, rollout: Rollout) -> None:
    """Stop a run whose rewards say nothing at all, step after step: it would end as it began, and seem to have trained.

    Raises:
        RunStopped: The same on all ranks.
    """
    scored = any(math.isfinite(completion.reward) for fact in rollout.sampled for completion in fact.completions)
    run.state.unscored_in_a_row = 0 if scored else run.state.unscored_in_a_row + 1
    if run.state.unscored_in_a_row >= run.config.rewards.max_unscored_steps:
        why = f" The last reason: {rollout.messages[0]}" if rollout.messages else ""
        raise RunStopped(
            f"Not one completion could be scored in {run.state.unscored_in_a_row} steps in a row, the last of them "
            f"step {run.state.step + 1}, so nothing was learned.{why} Mend the reward; rewards.max_unscored_steps is "
            "how long a run waits."
        )


def _one_round(run: PolicyRun, batch: PromptBatch) -> Rollout:
    config = run.config
    seeds = {prompt.prompt_id: _seeds(run, prompt.prompt_id) for prompt in batch.mine}
    groups = sample_groups(run, batch.mine, config.rollout, seeds)
    groups, scored = score_groups(run, groups)
    facts = share_facts(run, groups, scored)
    if config.advantage.needs_greedy:
        facts, scored = _with_greedy(run, batch.mine, facts, scored)
    trimmed = [_without_dropped(fact, config.groups) for fact in facts]
    weights = {reward.label: reward.weight for reward in config.reward}
    kept = {fact.prompt_id for fact in select(trimmed, config.groups, config.advantage, weights)}
    trimmed = [fact for fact in trimmed if fact.prompt_id in kept]
    mine = tuple(_trained_part(group, config.groups) for group in groups if group.prompt.prompt_id in kept)
    left_out = tuple(group for group in groups if group.prompt.prompt_id not in kept)
    told = run.exchange.gather([item.message for item in scored if item.message][:8])
    messages = tuple(line for lines in told for line in lines)
    return Rollout(mine, tuple(trimmed), tuple(facts), batch.metrics, messages, left_out)


def _seeds(run: PolicyRun, prompt_id: int) -> tuple[int, ...]:
    """Return the seed of each completion of a prompt, at any number of ranks the same."""
    config = run.config.rollout
    seed = run.config.seed if config.seed is None else config.seed
    return tuple(mixed(seed, run.state.step, prompt_id, place) for place in range(config.group_size))


def _with_greedy(
    run: PolicyRun, prompts: Sequence[Prompt], facts: Sequence[GroupFact], scored: Sequence[Scored]
) -> tuple[list[GroupFact], list[Scored]]:
    """Complete every prompt once more, greedily; return what that earns, and what scoring said of all completions."""
    sampling = run.config.rollout.model_copy(update={"temperature": 0.0})
    groups = sample_groups(run, prompts, sampling, {prompt.prompt_id: (0,) for prompt in prompts})
    rewarded, told = score_groups(run, groups)
    greedy = {fact.prompt_id: fact.completions[0] for fact in share_facts(run, rewarded, told)}
    known = [
        fact._replace(greedy=greedy[fact.prompt_id].reward, greedy_fault=greedy[fact.prompt_id].fault) for fact in facts
    ]
    return known, [*scored, *told]


def _joined(rounds: Sequence[Rollout], wanted: int) -> Rollout:
    """Return the first `wanted` groups of all rounds; those in excess are left out."""
    facts = sorted((fact for part in rounds for fact in part.facts), key=lambda fact: fact.prompt_id)[:wanted]
    kept = {fact.prompt_id for fact in facts}
    groups = [group for part in rounds for group in (*part.groups, *part.left_out)]
    return Rollout(
        tuple(group for group in groups if group.prompt.prompt_id in kept),
        tuple(facts),
        tuple(sorted((fact for part in rounds for fact in part.sampled), key=lambda fact: fact.prompt_id)),
        _counted(rounds),
        tuple(line for part in rounds for line in part.messages),
        tuple(group for group in groups if group.prompt.prompt_id not in kept),
    )


def _counted(rounds: Sequence[Rollout]) -> dict[str, float]:
    counted: dict[str, float] = {}
    for part in rounds:
        for name, value in part.counted.items():
            counted[name] = counted.get(name, 0.0) + value
    return counted | {"rollout/rounds": float(len(rounds))}


def sample_groups(
    run: SamplingEvaluation, prompts: Sequence[Prompt], sampling: SamplingConfig, seeds: Mapping[int, tuple[int, ...]]
) -> list[Group]:
    """Complete this rank's prompts; all ranks call this together, and wait for each other only at its end.

    Args:
        run: The policy.
        prompts: To complete.
        sampling: How.
        seeds: By prompt id, one per completion.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
    """
    with run.phase("rollout"):
        publish(run)
        requests = [
            Request(prompt.prompt_id, prompt.tokens, seeds[prompt.prompt_id], prompt.model_inputs, prompt.positions)
            for prompt in prompts
        ]
        sampled = generate(run.engine, requests, sampling, run.interrupted)
        aborted = any(completion.finish is Finish.ABORT for completion in sampled)
        if any(run.exchange.gather(aborted)):
            raise StepAbandoned
        by_prompt: dict[int, list[Trajectory]] = {prompt.prompt_id: [] for prompt in prompts}
        of_id = {prompt.prompt_id: prompt for prompt in prompts}
        for completion in sampled:
            prompt = of_id[completion.request_id]
            seed = seeds[prompt.prompt_id][completion.place]
            trajectory = trajectory_of(prompt, completion, seed, sampling, run.origin.tokenizer)
            by_prompt[prompt.prompt_id].append(trajectory)
    return [Group(prompt, tuple(by_prompt[prompt.prompt_id])) for prompt in prompts]


def score_groups(run: PolicyEvaluation, groups: Sequence[Group]) -> tuple[list[Group], list[Scored]]:
    """Return this rank's groups with their rewards, and what scoring said of each completion."""
    with run.phase("reward"):
        now = progress_of(run)
        samples = [_sample_of(group.prompt, trajectory, now) for group in groups for trajectory in group.trajectories]
        with run.exchange.together():  # what ends the reward processes of one rank ends the run on all
            scored = run.score(samples)
    following = iter(scored)
    rewarded = []
    for group in groups:
        found = [(trajectory, next(following)) for trajectory in group.trajectories]
        trajectories = tuple(
            replace(trajectory, reward=item.reward, rewards=dict(item.parts)) for trajectory, item in found
        )
        rewarded.append(replace(group, trajectories=trajectories))
    return rewarded, scored


def _sample_of(prompt: Prompt, trajectory: Trajectory, progress: Progress) -> Sample:
    return Sample(
        sample_id=trajectory.sample_id,
        prompt=prompt.text,
        completion=trajectory.completion,
        prompt_tokens=prompt.tokens.tolist(),
        completion_tokens=trajectory.tokens[trajectory.loss_mask].tolist(),
        finish=trajectory.finish.value,
        row=prompt.row,
        progress=progress,
    )


def share_facts(run: PolicyEvaluation, groups: Sequence[Group], scored: Sequence[Scored]) -> list[GroupFact]:
    """Return what all ranks know of all groups, by prompt; the same on every rank."""
    following = iter(scored)
    mine = [
        GroupFact(
            group.prompt.prompt_id,
            run.world.rank,
            tuple(_fact(trajectory, next(following)) for trajectory in group.trajectories),
            has_inputs=bool(group.prompt.model_inputs),
        )
        for group in groups
    ]
    return sorted((fact for facts in run.exchange.gather(mine) for fact in facts), key=lambda fact: fact.prompt_id)


def _fact(trajectory: Trajectory, scored: Scored) -> CompletionFact:
    return CompletionFact(
        math.nan if scored.reward is None else scored.reward,
        dict(scored.parts),
        trajectory.completion_length,
        trajectory.tokens.size,
        trajectory.finish,
        scored.fault,
        scored.drop,
        dict(scored.metrics),
        -float(trajectory.sampler_logprobs[trajectory.loss_mask].sum(dtype=np.float64)),
    )


def rewards_of(facts: Sequence[GroupFact]) -> NDArray[np.float64]:
    """Return the rewards of groups of one size, [P, G]; NaN where a completion was not scored."""
    return np.array([[fact.reward for fact in group.completions] for group in facts], dtype=np.float64)


def parts_of(facts: Sequence[GroupFact], label: str) -> NDArray[np.float64]:
    """Return one reward of groups of one size, [P, G]; NaN where it gave none, or the completion does not count."""
    return np.array(
        [
            [
                math.nan if math.isnan(fact.reward) or fact.parts.get(label) is None else fact.parts[label]
                for fact in group.completions
            ]
            for group in facts
        ],
        dtype=np.float64,
    )


def select(
    facts: Sequence[GroupFact], config: GroupsConfig, advantage: AdvantageConfig, weights: Mapping[str, float]
) -> list[GroupFact]:
    """Return the groups that are trained on: a pure function of what all ranks know.

    Args:
        facts: With rewards that count for no baseline already taken out.
        config: Which groups.
        advantage: Says what completions are compared by, and so which groups teach nothing.
        weights: Of the rewards, by name.
    """
    eligible = [fact for fact in facts if _eligible(fact, config, advantage)]
    if config.flat == "keep" or not eligible:
        return eligible
    parts = {label: parts_of(eligible, label) for label in weights}
    teaching = ~without_advantages(advantage, rewards_of(eligible), parts, weights)
    return [fact for fact, teaches in zip(eligible, teaching, strict=True) if teaches]


def _eligible(fact: GroupFact, config: GroupsConfig, advantage: AdvantageConfig) -> bool:
    # Without its baseline a group has nothing to be compared with, whether its completions were scored or not.
    if advantage.needs_greedy and math.isnan(fact.greedy):
        return False
    dropped = any(completion.drop == "group" for completion in fact.completions)
    return not dropped and (config.between is None or _between(fact, config.between))


def trained_tokens(fact: CompletionFact, config: GroupsConfig) -> int:
    """Return how many tokens of a completion are trained."""
    was_cut = fact.finish is Finish.LENGTH and config.truncated != "keep"
    return 0 if was_cut or math.isnan(fact.reward) else fact.length


def _between(fact: GroupFact, between: BetweenConfig) -> bool:
    values = [completion.parts.get(between.reward) for completion in fact.completions]
    known = [value for value in values if value is not None]
    if not known:
        return False
    mean = float(np.mean(known))
    return (between.low is None or mean > between.low) and (between.high is None or mean < between.high)


def _without_dropped(fact: GroupFact, config: GroupsConfig) -> GroupFact:
    """Take rewards that count for no baseline out of it."""
    return fact._replace(
        completions=tuple(
            completion._replace(reward=math.nan)
            if completion.drop is not None or (completion.finish is Finish.LENGTH and config.truncated == "drop")
            else completion
            for completion in fact.completions
        )
    )


def _trained_part(group: Group, config: GroupsConfig) -> Group:
    """Mask completions that are not trained: those without a reward, and perhaps those that were cut."""

    def masked(trajectory: Trajectory) -> Trajectory:
        was_cut = trajectory.finish is Finish.LENGTH and config.truncated != "keep"
        if trajectory.reward is not None and not was_cut:
            return trajectory
        return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))

    return replace(group, trajectories=tuple(masked(trajectory) for trajectory in group.trajectories))
