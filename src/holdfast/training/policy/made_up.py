"""Rollouts with artificial rewards, for the trial step before step 1 and for plans, which call no reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.rewards.base import Scored
from holdfast.training.policy.groups import facts_of, share_facts
from holdfast.training.policy.rollouts import Rollout
from holdfast.types import Finish, Group


def made_up_rollout(
    groups: Sequence[Group], config: GRPOConfig, ranks: RankGroup, *, of_all_ranks: bool = False
) -> Rollout:
    """Reward every second completion of each group, and let none be one that was cut, which may not be trained on.

    Args:
        groups: Those of this rank.
        config: Of the run; each of its rewards gives a completion the same number.
        ranks: All ranks call this together.
        of_all_ranks: The groups are those of every rank, as in a plan, and nothing is gathered.
    """
    rewarded, scored = [], []
    for group in groups:
        trajectories = []
        for index, trajectory in enumerate(group.trajectories):
            reward = float(index % 2)
            rewards = {section.label: reward for section in config.reward}
            scored.append(Scored(reward, rewards))
            trajectories.append(replace(trajectory, reward=reward, rewards=rewards, finish=Finish.STOP))
        rewarded.append(replace(group, trajectories=tuple(trajectories)))
    facts = facts_of(ranks.rank, rewarded, scored) if of_all_ranks else share_facts(ranks, rewarded, scored)
    facts = [fact._replace(greedy=0.0) for fact in facts]
    return Rollout(tuple(rewarded), tuple(facts), tuple(facts), {}, ())
