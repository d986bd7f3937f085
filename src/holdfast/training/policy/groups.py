"""Facts about a step's completions that all ranks share, and the selection of groups to train on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.advantages.group import Mask, without_advantages
from holdfast.advantages.turns import TurnMatrix, discounted_returns, turn_advantages
from holdfast.config.sections.advantage import AdvantageConfig
from holdfast.config.sections.rollout import BetweenConfig, GroupsConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.rewards.base import Scored
from holdfast.types import EpisodeSummary, Finish, Group, Trajectory


class CompletionSummary(NamedTuple):
    """The facts about one completion that all ranks share."""

    reward: float
    """NaN if it was not scored."""
    parts: Mapping[str, float | None]
    length: int
    tokens: int
    """Number of tokens of prompt and completion."""
    finish: Finish
    fault: str | None
    drop: str | None
    metrics: Mapping[str, float] = MappingProxyType({})
    """Further metrics that rewards reported."""
    nll: float = math.nan
    """Minus the log-probability of its tokens under the distributions they were drawn from, summed, in nats."""
    episode: EpisodeSummary | None = None
    """Without its messages."""
    oldest_weights: int = -1
    """Updates of the oldest weights that sampled a token of it; -1 where no engine said."""


class GroupFact(NamedTuple):
    """The facts about one group of completions that all ranks share."""

    prompt_id: int
    owner: int
    """The rank that holds it."""
    completions: tuple[CompletionSummary, ...]
    greedy: float = math.nan
    """Reward of the greedy completion, where the advantage needs one; NaN if it was not scored."""
    greedy_fault: str | None = None
    prompt_tokens: int | None = None
    """That all completions begin with; None where a completion is all that is not trained."""
    has_inputs: bool = False
    """Whether its prompt brings inputs only the model understands."""


def share_facts(ranks: RankGroup, groups: Sequence[Group], scored: Sequence[Scored]) -> list[GroupFact]:
    """Return what all ranks know of all groups, by prompt; the same on every rank."""
    gathered = ranks.gather(facts_of(ranks.rank, groups, scored))
    return sorted((fact for facts in gathered for fact in facts), key=lambda fact: fact.prompt_id)


def facts_of(rank: int, groups: Sequence[Group], scored: Sequence[Scored]) -> list[GroupFact]:
    """Return the facts of one rank's groups; `scored` has their completions, group after group."""
    following = iter(scored)
    return [
        GroupFact(
            group.prompt.prompt_id,
            rank,
            tuple(_fact(trajectory, next(following)) for trajectory in group.trajectories),
            prompt_tokens=group.prompt.tokens.size,
            has_inputs=bool(group.prompt.model_inputs),
        )
        for group in groups
    ]


def _fact(trajectory: Trajectory, scored: Scored) -> CompletionSummary:
    return CompletionSummary(
        math.nan if scored.reward is None else scored.reward,
        dict(scored.parts),
        trajectory.completion_length,
        trajectory.tokens.size,
        trajectory.finish,
        scored.fault,
        scored.drop,
        dict(scored.metrics),
        -float(trajectory.sampler_logprobs[trajectory.loss_mask].sum(dtype=np.float64)),
        None if trajectory.episode is None else replace(trajectory.episode, messages=(), tools=()),
        int(min(trajectory.weights_versions[trajectory.loss_mask], default=-1)),
    )


def rewards_of(facts: Sequence[GroupFact]) -> NDArray[np.float64]:
    """Return the rewards of groups of one size, [P, G]; NaN where a completion was not scored."""
    return np.array([[fact.reward for fact in group.completions] for group in facts], dtype=np.float64)


def lengths_of(facts: Sequence[GroupFact]) -> NDArray[np.float64]:
    """Return the lengths of the completions of groups of one size, in tokens, [P, G]."""
    return np.array([[fact.length for fact in group.completions] for group in facts], dtype=np.float64)


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


def returns_of(facts: Sequence[GroupFact], discount: float, environment_weight: float) -> TurnMatrix:
    """Return the discounted returns of the turns of groups of one size, [P, G, T]; NaN where there is no such turn.

    What a turn was rewarded with is the environment's reward by its weight. What further rewards gave is of the whole
    episode, and so of its last turn.

    Args:
        facts: Of episodes; a completion without one is a single turn.
        discount: Of a reward for each turn that lies before it.
        environment_weight: Of `reward: environment`; 0 without it.
    """
    rows = [[_returns(fact, discount, environment_weight) for fact in group.completions] for group in facts]
    size = len(rows[0]) if rows else 0
    returns = np.full((len(rows), size, max((len(turns) for row in rows for turns in row), default=0)), np.nan)
    for prompt, row in enumerate(rows):
        for place, turns in enumerate(row):
            returns[prompt, place, : len(turns)] = turns
    return returns


def _returns(fact: CompletionSummary, discount: float, environment_weight: float) -> list[float]:
    if math.isnan(fact.reward):
        return []
    if fact.episode is None:
        return [fact.reward]
    rewards = [environment_weight * reward for reward in fact.episode.turn_rewards]
    if rewards:
        rewards[-1] += fact.reward - math.fsum(rewards)
    return discounted_returns(rewards, discount)


def select(
    facts: Sequence[GroupFact],
    config: GroupsConfig,
    advantage: AdvantageConfig,
    weights: Mapping[str, float],
    environment_weight: float = 0.0,
) -> list[GroupFact]:
    """Return the groups that are trained on: a pure function of what all ranks know.

    Args:
        facts: With rewards that count for no baseline already taken out.
        config: Which groups.
        advantage: Says what completions are compared by, and so which groups teach nothing.
        weights: Of the rewards, by name.
        environment_weight: Of those that an environment gives turn by turn.
    """
    eligible = [fact for fact in facts if _eligible(fact, config, advantage)]
    if config.flat == "keep" or not eligible:
        return eligible
    trained = np.array(
        [[trained_tokens(completion, config) > 0 for completion in fact.completions] for fact in eligible]
    )
    if advantage.turn_discount is None:
        reward_parts = {label: parts_of(eligible, label) for label in weights}
        teaching: Mask = ~without_advantages(
            advantage, rewards_of(eligible), reward_parts, weights, trained, lengths_of(eligible)
        )
    else:
        returns = returns_of(eligible, advantage.turn_discount, environment_weight)
        teaching = np.asarray((turn_advantages(advantage, returns).any(axis=2) & trained).any(axis=1))
    return [fact for fact, teaches in zip(eligible, teaching, strict=True) if teaches]


def _eligible(fact: GroupFact, config: GroupsConfig, advantage: AdvantageConfig) -> bool:
    # Without its baseline a group has nothing to be compared with, whether its completions were scored or not.
    if advantage.needs_greedy and math.isnan(fact.greedy):
        return False
    dropped = any(completion.drop == "group" for completion in fact.completions)
    return not dropped and (config.between is None or _between(fact, config.between))


def trained_tokens(fact: CompletionSummary, config: GroupsConfig) -> int:
    """Return how many tokens of a completion are trained."""
    return 0 if _is_cut(fact.finish, config) or math.isnan(fact.reward) else fact.length


def sample_sizes(fact: CompletionSummary, config: GroupsConfig) -> list[tuple[int, int]]:
    """Return (tokens, trained tokens) of each sequence that a completion is trained as."""
    trained = trained_tokens(fact, config)
    if fact.episode is None or len(fact.episode.samples) < 2:
        return [(fact.tokens, trained)]
    return [(tokens, chosen if trained else 0) for tokens, chosen in fact.episode.samples]


def _is_cut(finish: Finish, config: GroupsConfig) -> bool:
    return finish is Finish.LENGTH and config.truncated != "keep"


def _between(fact: GroupFact, between: BetweenConfig) -> bool:
    values = [completion.parts.get(between.reward) for completion in fact.completions]
    numbers = [value for value in values if value is not None]
    if not numbers:
        return False
    mean = float(np.mean(numbers))
    return (between.low is None or mean > between.low) and (between.high is None or mean < between.high)


def with_baselines(facts: Sequence[GroupFact], greedy: Sequence[GroupFact], config: GroupsConfig) -> list[GroupFact]:
    """Give each group the reward of its prompt's greedy completion; NaN if that counts for no baseline.

    Args:
        facts: The groups.
        greedy: Of the same prompts, one completion each.
        config: Says whether what was cut counts.
    """
    baselines = {fact.prompt_id: without_dropped(fact, config).completions[0] for fact in greedy}
    return [
        fact._replace(greedy=baselines[fact.prompt_id].reward, greedy_fault=baselines[fact.prompt_id].fault)
        for fact in facts
    ]


def without_dropped(fact: GroupFact, config: GroupsConfig) -> GroupFact:
    """Remove rewards that do not count towards a baseline."""
    return fact._replace(
        completions=tuple(
            completion._replace(reward=math.nan)
            if completion.drop is not None or (completion.finish is Finish.LENGTH and config.truncated == "drop")
            else completion
            for completion in fact.completions
        )
    )


def trained_part(group: Group, config: GroupsConfig) -> Group:
    """Mask completions that are not trained: those without a reward, and perhaps those that were cut."""

    def masked(trajectory: Trajectory) -> Trajectory:
        if trajectory.reward is not None and not _is_cut(trajectory.finish, config):
            return trajectory
        return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))

    return replace(group, trajectories=tuple(masked(trajectory) for trajectory in group.trajectories))


def warn_of_unknown_reward(facts: Sequence[GroupFact], between: BetweenConfig | None) -> list[str]:
    """Warn if groups are selected by a reward that no completion has; only its first name is checked before step 1."""
    names = sorted({name for fact in facts for completion in fact.completions for name in completion.parts})
    if between is None or not names or between.reward in names:
        return []
    return [
        f"warning: groups.between.reward: no completion of this step has {between.reward}, so every group is left out; "
        f"they have {', '.join(names)}"
    ]
