"""Advantages of turns, by hand: discounted returns, compared with the same turn of the group's other episodes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.advantages.group import advantages
from holdfast.advantages.turns import discounted_returns, turn_advantages
from holdfast.config.sections.advantage import DrGRPOAdvantageConfig, GRPOAdvantageConfig, RLOOAdvantageConfig
from holdfast.config.sections.rollout import GroupsConfig
from holdfast.training.policy.experience import on_tokens
from holdfast.training.policy.groups import CompletionSummary, GroupFact, returns_of, select
from holdfast.types import EpisodeSummary, Finish, Trajectory

NAN = math.nan


def episode(reward: float, *turn_rewards: float) -> CompletionSummary:
    """Return an episode of turns of two tokens each."""
    turns = len(turn_rewards)
    summary = EpisodeSummary((), 1, turns, "done", sum(turn_rewards), turn_rewards, (2,) * turns, {}, 0, 0, 0.0, {})
    return CompletionSummary(reward, {"exact": reward}, 2 * turns, 9, Finish.STOP, None, None, episode=summary)


def test_a_return_is_the_discounted_sum_of_the_rewards_from_its_turn_on() -> None:
    assert discounted_returns([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert discounted_returns([1.0, 0.0, 4.0], 1.0) == [5.0, 4.0, 4.0]


def test_the_environment_rewards_its_turn_and_every_other_reward_the_last() -> None:
    """Rewards of turns 1, 2 by weight 0.5 are 0.5, 1; of a total of 4.5 the other rewards gave 3, at the last turn."""
    group = GroupFact(0, 0, (episode(4.5, 1.0, 2.0), episode(3.0, 0.0), episode(NAN, 1.0, 1.0), episode(1.0)))

    returns = returns_of([group], 0.5, 0.5)

    np.testing.assert_array_equal(returns, [[[0.5 + 0.5 * 4.0, 4.0], [3.0, NAN], [NAN, NAN], [NAN, NAN]]])


RETURNS = np.array([[[1.0, 4.0], [3.0, 2.0], [5.0, NAN], [NAN, NAN]]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DrGRPOAdvantageConfig(turns="discounted"), [[-2.0, 1.0], [0.0, -1.0], [2.0, 0.0], [0.0, 0.0]]),
        (RLOOAdvantageConfig(turns="discounted"), [[-3.0, 2.0], [0.0, -2.0], [3.0, 0.0], [0.0, 0.0]]),
        (
            GRPOAdvantageConfig(turns="discounted", epsilon=0.0),
            [[-1.0, math.sqrt(0.5)], [0.0, -math.sqrt(0.5)], [1.0, 0.0], [0.0, 0.0]],
        ),
    ],
)
def test_a_turn_is_compared_with_the_same_turn_of_its_group(
    config: GRPOAdvantageConfig, expected: list[list[float]]
) -> None:
    """Turn 1 has the returns 1, 3, 5 of mean 3 and deviation 2; turn 2 has 4, 2 of mean 3 and deviation sqrt(2)."""
    np.testing.assert_allclose(turn_advantages(config, RETURNS), [expected], rtol=1e-15)


def test_a_turn_that_one_episode_reached_has_no_advantage() -> None:
    returns = np.array([[[1.0, 7.0], [3.0, NAN]]])

    assert turn_advantages(DrGRPOAdvantageConfig(), returns).tolist() == [[[-1.0, 0.0], [1.0, 0.0]]]


def test_with_one_reward_at_the_end_and_no_discount_turns_have_the_advantage_of_their_episode() -> None:
    group = GroupFact(0, 0, (episode(2.0, 0.0, 2.0), episode(0.5, 0.0, 0.5), episode(1.0, 0.0, 1.0)))
    config = GRPOAdvantageConfig(turns="discounted")

    found = turn_advantages(config, returns_of([group], 1.0, 1.0))

    whole = advantages(config, np.array([[2.0, 0.5, 1.0]]))
    np.testing.assert_array_equal(found, np.stack([whole, whole], axis=2))


def test_a_group_teaches_by_its_turns_where_its_episodes_are_alike() -> None:
    """Both groups earned 1 in every episode; in the second they differ in when."""
    alike = GroupFact(0, 0, (episode(1.0, 1.0, 0.0), episode(1.0, 1.0, 0.0)))
    differs = GroupFact(1, 0, (episode(1.0, 1.0, 0.0), episode(1.0, 0.0, 1.0)))
    weights = {"environment": 1.0}

    by_turn = select([alike, differs], GroupsConfig(flat="drop"), GRPOAdvantageConfig(turns="discounted"), weights, 1.0)
    by_episode = select([alike, differs], GroupsConfig(flat="drop"), GRPOAdvantageConfig(), {"exact": 1.0})

    assert [fact.prompt_id for fact in by_turn] == [1]
    assert by_episode == []


def test_an_advantage_stands_on_the_tokens_of_its_turn_and_on_no_observed_one() -> None:
    """A prompt of two tokens, a turn of two, an observation of three, and a turn of one."""
    chosen = np.array([0, 0, 1, 1, 0, 0, 0, 1], np.bool_)
    summary = EpisodeSummary((), 1, 2, "done", 0.0, (0.0, 0.0), (2, 1), {}, 0, 0, 0.0, {})
    zeros = np.zeros(8, np.float32)
    trajectory = Trajectory(
        0, 0, 0, 1.0, np.arange(8), chosen, zeros, np.full(8, -1, np.int32), Finish.STOP, episode=summary
    )

    by_turn = on_tokens(trajectory, np.array([0.5, -2.0, 9.0]))
    whole = on_tokens(trajectory, np.array(0.25))

    assert by_turn.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, -2.0]
    assert whole.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0, 0.25]
