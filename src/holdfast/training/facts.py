"""What all ranks know of a step's completions, whichever rank holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.rewards.base import Scored
from holdfast.training.policy import PolicyEvaluation
from holdfast.types import Finish, Group, Trajectory


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
