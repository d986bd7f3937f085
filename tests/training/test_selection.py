"""Which groups are trained on, from what all ranks know of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.config.sections.advantage import (
    GRPOAdvantageConfig,
    PassAtKAdvantageConfig,
    ReinforcePPBaselineAdvantageConfig,
    ReMaxAdvantageConfig,
)
from holdfast.config.sections.rollout import BetweenConfig, GroupsConfig
from holdfast.training.policy.groups import CompletionSummary, GroupFact, select, with_baselines
from holdfast.types import Finish


def group(number: int, rewards: Sequence[float], parts: Sequence[dict[str, float | None]] | None = None) -> GroupFact:
    told = parts or [{"exact": reward} for reward in rewards]
    completions = tuple(
        CompletionSummary(reward, part, 4, 9, Finish.STOP, None, None)
        for reward, part in zip(rewards, told, strict=True)
    )
    return GroupFact(number, 0, completions)


def kept(facts: Sequence[GroupFact], advantage: Any, flat: str = "drop", **weights: float) -> list[int]:
    found = select(facts, GroupsConfig(flat=flat), advantage, weights or {"exact": 1.0})  # type: ignore[arg-type]
    return [fact.prompt_id for fact in found]


def test_under_pass_at_k_a_group_that_any_k_of_its_completions_solve_is_flat() -> None:
    """Of 8 completions, k=4: with 5 right ones 3 are wrong, so every four hold a right one; with 4 right ones not."""
    facts = [group(right, [1.0] * right + [0.0] * (8 - right)) for right in range(9)]

    assert kept(facts, PassAtKAdvantageConfig(k=4)) == [1, 2, 3, 4]
    assert kept(facts, PassAtKAdvantageConfig(k=4), flat="keep") == list(range(9))
    assert kept(facts, GRPOAdvantageConfig()) == list(range(1, 8))


def test_a_group_too_few_of_whose_completions_were_scored_is_flat() -> None:
    facts = [group(0, [1.0, 0.0, 0.0, 0.0, math.nan]), group(1, [1.0, 0.0, 0.0, 0.0, 0.0])]

    assert kept(facts, PassAtKAdvantageConfig(k=4)) == [1]


@pytest.mark.parametrize("advantage", [GRPOAdvantageConfig, ReinforcePPBaselineAdvantageConfig])
def test_a_group_is_judged_by_its_own_completions_and_not_by_its_batch(advantage: Any) -> None:
    facts = [group(0, [0.1, 0.1 + 1e-9]), group(1, [0.0, 1e-3]), group(2, [5.0, -5.0])]

    assert kept(facts, advantage()) == [1, 2]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.25, 0.75, [2]), (0.25, None, [2, 3, 4]), (None, 0.75, [0, 1, 2]), (0.2, 0.8, [1, 2, 3])],
)
def test_a_group_is_kept_whose_mean_reward_lies_strictly_between_two_numbers(
    low: float | None, high: float | None, expected: list[int]
) -> None:
    facts = [group(number, [1.0] * number + [0.0] * (4 - number)) for number in range(5)]
    unscored = group(5, [1.0, 0.0], [{"exact": None}, {"exact": None}])
    between = BetweenConfig(reward="exact", low=low, high=high)

    found = select([*facts, unscored], GroupsConfig(between=between), GRPOAdvantageConfig(), {"exact": 1.0})

    assert [fact.prompt_id for fact in found] == expected


@pytest.mark.parametrize("flat", ["drop", "resample"])
def test_a_group_teaches_nothing_where_only_masked_completions_have_an_advantage(flat: str) -> None:
    """Of group 1 the middle completion is trained, which is as good as the mean of its group."""

    def cut(fact: GroupFact, *places: int) -> GroupFact:
        ends = [Finish.LENGTH if place in places else Finish.STOP for place in range(len(fact.completions))]
        cut_off = (each._replace(finish=finish) for each, finish in zip(fact.completions, ends, strict=True))
        return fact._replace(completions=tuple(cut_off))

    rewards = {0: [1.0, 0.0, 1.0], 1: [2.0, 1.0, 0.0], 2: [1.0, 0.0, 0.0]}
    places = {0: (0, 1, 2), 1: (0, 2), 2: (1,)}
    facts = [cut(group(number, rewards[number]), *places[number]) for number in rewards]

    def trained(truncated: str) -> list[int]:
        config = GroupsConfig(flat=flat, truncated=truncated)  # type: ignore[arg-type]
        return [fact.prompt_id for fact in select(facts, config, GRPOAdvantageConfig(), {"exact": 1.0})]

    assert trained("mask") == [2]
    assert trained("keep") == [0, 1, 2]


@pytest.mark.parametrize(("truncated", "baseline"), [("drop", math.nan), ("mask", 0.5), ("keep", 0.5)])
def test_a_greedy_completion_that_was_cut_is_a_baseline_where_cut_ones_count(truncated: str, baseline: float) -> None:
    facts = [group(3, [1.0, 0.0]), group(5, [1.0, 0.0])]
    greedy = [group(5, [0.25]), group(3, [0.5])]
    greedy[1] = greedy[1]._replace(completions=(greedy[1].completions[0]._replace(finish=Finish.LENGTH),))
    config = GroupsConfig(truncated=truncated)  # type: ignore[arg-type]

    found = with_baselines(facts, greedy, config)

    assert [fact.greedy for fact in found] == pytest.approx([baseline, 0.25], nan_ok=True)
    kept_ids = [fact.prompt_id for fact in select(found, config, ReMaxAdvantageConfig(), {"exact": 1.0})]
    assert kept_ids == ([5] if math.isnan(baseline) else [3, 5])


def test_rewards_normalised_one_by_one_teach_where_their_sum_is_flat() -> None:
    opposed = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]
    facts = [group(0, [1.0, 1.0, 1.0], opposed), group(1, [2.0, 2.0, 2.0], [{"a": 1.0, "b": 1.0}] * 3)]
    alone = GRPOAdvantageConfig(combine="normalise_then_sum")

    assert kept(facts, alone, a=1.0, b=3.0) == [0]
    assert kept(facts, alone, a=0.0, b=0.0) == []
    assert kept(facts, GRPOAdvantageConfig(), a=1.0, b=1.0) == []
