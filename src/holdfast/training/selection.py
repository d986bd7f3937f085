"""Which groups of a rollout, and which of their completions, are trained on: decided from facts all ranks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from holdfast.advantages.group import without_advantages
from holdfast.config.policy import AdvantageConfig
from holdfast.config.rollout import BetweenConfig, GroupsConfig
from holdfast.training.facts import CompletionFact, GroupFact, parts_of, rewards_of
from holdfast.types import Finish, Group, Trajectory


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
    trained = np.array([[trained_tokens(each, config) > 0 for each in fact.completions] for fact in eligible])
    teaching = ~without_advantages(advantage, rewards_of(eligible), parts, weights, trained)
    return [fact for fact, teaches in zip(eligible, teaching, strict=True) if teaches]


def _eligible(fact: GroupFact, config: GroupsConfig, advantage: AdvantageConfig) -> bool:
    # Without its baseline a group has nothing to be compared with, whether its completions were scored or not.
    if advantage.needs_greedy and math.isnan(fact.greedy):
        return False
    dropped = any(completion.drop == "group" for completion in fact.completions)
    return not dropped and (config.between is None or _between(fact, config.between))


def trained_tokens(fact: CompletionFact, config: GroupsConfig) -> int:
    """Return how many tokens of a completion are trained."""
    return 0 if _is_cut(fact.finish, config) or math.isnan(fact.reward) else fact.length


def _is_cut(finish: Finish, config: GroupsConfig) -> bool:
    return finish is Finish.LENGTH and config.truncated != "keep"


def _between(fact: GroupFact, between: BetweenConfig) -> bool:
    values = [completion.parts.get(between.reward) for completion in fact.completions]
    known = [value for value in values if value is not None]
    if not known:
        return False
    mean = float(np.mean(known))
    return (between.low is None or mean > between.low) and (between.high is None or mean < between.high)


def with_baselines(facts: Sequence[GroupFact], greedy: Sequence[GroupFact], config: GroupsConfig) -> list[GroupFact]:
    """Tell each group what its prompt's greedy completion earned; of one that counts for no baseline, NaN.

    Args:
        facts: The groups.
        greedy: Of the same prompts, one completion each.
        config: Says whether what was cut counts.
    """
    found = {fact.prompt_id: without_dropped(fact, config).completions[0] for fact in greedy}
    return [
        fact._replace(greedy=found[fact.prompt_id].reward, greedy_fault=found[fact.prompt_id].fault) for fact in facts
    ]


def without_dropped(fact: GroupFact, config: GroupsConfig) -> GroupFact:
    """Take rewards that count for no baseline out of it."""
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
    """Say so where groups are chosen by what no completion has; its first word alone is checked before step 1."""
    known = sorted({name for fact in facts for completion in fact.completions for name in completion.parts})
    if between is None or not known or between.reward in known:
        return []
    return [
        f"warning: groups.between.reward: no completion of this step has {between.reward}, so every group is left out; "
        f"they have {', '.join(known)}"
    ]
