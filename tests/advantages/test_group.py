"""Advantages against plain Python, on whole groups, with unscored completions, and where rewards are identical."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.advantages.group import advantages, flat_groups, without_baseline
from holdfast.config.sections.advantage import (
    BatchStdAdvantageConfig,
    DrGRPOAdvantageConfig,
    GPGAdvantageConfig,
    GRPOAdvantageConfig,
    MaxRLAdvantageConfig,
    OPOAdvantageConfig,
    PassAtKAdvantageConfig,
    ReinforcePPAdvantageConfig,
    ReinforcePPBaselineAdvantageConfig,
    ReMaxAdvantageConfig,
    RLOOAdvantageConfig,
)
from tests.oracle import advantages as oracle
from tests.oracle.advantages import Row

EXACT = {"rtol": 1e-9, "atol": 1e-9}
Oracle = Callable[[list[Row]], list[list[float]]]
COMPARED: dict[str, tuple[Any, Oracle]] = {
    "grpo": (GRPOAdvantageConfig(epsilon=1e-4), lambda rows: oracle.grpo(rows, 1e-4)),
    "dr_grpo": (DrGRPOAdvantageConfig(), oracle.dr_grpo),
    "gpg": (GPGAdvantageConfig(), oracle.gpg),
    "rloo": (RLOOAdvantageConfig(), oracle.rloo),
    "reinforce_pp": (ReinforcePPAdvantageConfig(epsilon=1e-4), lambda rows: oracle.reinforce_pp(rows, 1e-4)),
    "reinforce_pp_baseline": (
        ReinforcePPBaselineAdvantageConfig(epsilon=1e-4),
        lambda rows: oracle.over_the_batch(rows, centred(rows), 1e-4),
    ),
    "batch_std": (BatchStdAdvantageConfig(epsilon=1e-4), lambda rows: oracle.over_the_batch(rows, rows, 1e-4)),
}
each_comparison = pytest.mark.parametrize(("config", "expected"), COMPARED.values(), ids=COMPARED)
WITHIN_GROUPS = [each for name, (each, _) in COMPARED.items() if name != "reinforce_pp"]


def centred(rows: list[Row]) -> list[Row]:
    means = oracle.dr_grpo(rows)
    return [
        [None if r is None else value for r, value in zip(row, mean, strict=True)]
        for row, mean in zip(rows, means, strict=True)
    ]


def as_array(rows: list[Row]) -> np.ndarray[Any, Any]:
    return np.array([[math.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def draw(seed: int, holes: bool) -> list[Row]:
    generator = np.random.default_rng(seed)
    rows: list[Row] = generator.normal(2.0, 3.0, (6, 5)).tolist()
    if holes:
        rows[1][2] = rows[1][4] = rows[3][0] = None
    return rows


@each_comparison
@pytest.mark.parametrize("holes", [False, True], ids=["all scored", "some not scored"])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_the_paper(config: Any, expected: Oracle, holes: bool, seed: int) -> None:
    rows = draw(seed, holes)

    found = advantages(config, as_array(rows))

    np.testing.assert_allclose(found, expected(rows), **EXACT)


@pytest.mark.parametrize("holes", [False, True], ids=["all scored", "some not scored"])
def test_the_optimal_baseline_weighs_rewards_by_length(holes: bool) -> None:
    rows = draw(0, holes)
    lengths = np.random.default_rng(1).integers(1, 900, (6, 5))

    found = advantages(OPOAdvantageConfig(), as_array(rows), lengths=lengths.astype(np.float64))

    np.testing.assert_allclose(found, oracle.opo(rows, lengths.tolist()), **EXACT)
    # The gradient of a group whose tokens weigh alike sums to nothing.
    np.testing.assert_allclose((found * np.where(np.isfinite(as_array(rows)), lengths, 0)).sum(1), 0, atol=1e-9)
    with pytest.raises(ValueError, match="needs the lengths"):
        advantages(OPOAdvantageConfig(), as_array(rows))


def test_maximum_likelihood_divides_by_the_share_of_right_answers() -> None:
    rows: list[Row] = [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, None, 0, 0], [-1, -1, 0, 0]]

    found = advantages(MaxRLAdvantageConfig(), as_array(rows))

    np.testing.assert_allclose(found[:5], [oracle.maxrl(row) for row in rows[:5]], **EXACT)
    assert found[0].tolist() == [3.0, -1.0, -1.0, -1.0]
    assert not found[2:4].any()
    assert not found[5].any()


def test_policy_gradients_of_groups_make_up_for_groups_that_teach_nothing() -> None:
    rows: list[Row] = [
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [0, None, 0, 0],
        [None, None, 1, None],
        [1, 1, 0, None],
        [0, 0, 0, 0],
    ]

    found = advantages(GPGAdvantageConfig(), as_array(rows))

    np.testing.assert_allclose(found, oracle.gpg(rows), **EXACT)
    assert found[0].tolist() == [0.75 * 2.5, -0.25 * 2.5, -0.25 * 2.5, -0.25 * 2.5]
    assert not advantages(GPGAdvantageConfig(), as_array([rows[1], rows[5]])).any()


@pytest.mark.parametrize("config", [each for each, _ in COMPARED.values()], ids=COMPARED)
def test_a_completion_that_was_not_scored_moves_nobody(config: Any) -> None:
    rows = as_array(draw(0, holes=False))
    wider = np.concatenate([rows, np.full((6, 1), np.nan)], axis=1)

    found = advantages(config, wider)

    np.testing.assert_allclose(found[:, :5], advantages(config, rows), **EXACT)
    assert not found[:, 5].any()


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_an_infinite_reward_counts_as_not_scored(infinite: float) -> None:
    rewards = np.array([[1.0, 0.0, infinite], [0.0, 1.0, 1.0]])

    found = advantages(DrGRPOAdvantageConfig(), rewards)

    np.testing.assert_allclose(found[0], [0.5, -0.5, 0.0], **EXACT)


@pytest.mark.parametrize("config", WITHIN_GROUPS, ids=lambda each: each.kind)
@pytest.mark.parametrize("reward", [0.1, 1.0, -3.3, 0.0])
def test_identical_rewards_give_exactly_zero_and_not_their_rounding_error(config: Any, reward: float) -> None:
    rewards = np.array([[reward] * 7, [reward, reward, 1.7, reward, reward, 0.2, reward]])
    noisy = rewards + np.array([[0, 1e-7, -1e-7, 0, 1e-8, 0, 0], [0] * 7])

    assert not advantages(config, rewards)[0].any()
    assert not advantages(config, noisy)[0].any()
    assert advantages(config, rewards)[1].any()


def test_a_batch_of_identical_rewards_gives_exactly_zero_against_the_batch() -> None:
    config = ReinforcePPAdvantageConfig()

    assert not advantages(config, np.full((3, 7), 0.1)).any()
    assert advantages(config, np.array([[0.1, 0.1], [0.3, 0.3]])).all()


@pytest.mark.parametrize("config", WITHIN_GROUPS, ids=lambda each: each.kind)
def test_a_group_of_one_has_no_advantage_and_never_its_raw_reward(config: Any) -> None:
    rewards = np.array([[5.0, math.nan, math.nan], [1.0, 0.0, 1.0], [math.nan] * 3])

    found = advantages(config, rewards)

    assert not found[0].any()
    assert not found[2].any()
    assert found[1].all()
    assert without_baseline(config, rewards).tolist() == [True, False, True]


def test_a_group_without_a_baseline_is_in_nothing_of_the_batch() -> None:
    whole = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 0.5]])
    alone = np.concatenate([whole, [[100.0, math.nan, math.nan]]])

    for config in (BatchStdAdvantageConfig(), ReinforcePPBaselineAdvantageConfig(), GPGAdvantageConfig()):
        np.testing.assert_allclose(advantages(config, alone)[:2], advantages(config, whole), **EXACT)


def test_rloo_is_the_group_mean_scaled_by_g_over_g_minus_one() -> None:
    rewards = as_array(draw(2, holes=False))

    np.testing.assert_allclose(
        advantages(RLOOAdvantageConfig(), rewards), advantages(DrGRPOAdvantageConfig(), rewards) * 5 / 4, **EXACT
    )


@pytest.mark.parametrize("prompts", [3, 4], ids=["another number of prompts", "as many prompts as completions"])
def test_remax_takes_from_each_completion_the_greedy_reward_of_its_own_prompt(prompts: int) -> None:
    generator = np.random.default_rng(0)
    rewards, greedy = generator.normal(size=(prompts, 4)), generator.normal(size=prompts)
    expected = [[rewards[p][g] - greedy[p] for g in range(4)] for p in range(prompts)]

    found = advantages(ReMaxAdvantageConfig(), rewards, greedy=greedy)

    np.testing.assert_allclose(found, expected, **EXACT)


def test_remax_of_rewards_like_the_greedy_one_is_exactly_zero_and_needs_its_score() -> None:
    config, rewards = ReMaxAdvantageConfig(), np.array([[0.1 + 1e-9, 0.1], [1.0, 0.0]])

    found = advantages(config, rewards, greedy=np.array([0.1, math.nan]))

    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert without_baseline(config, rewards, np.array([0.1, math.nan])).tolist() == [False, True]
    with pytest.raises(ValueError, match="remax needs the rewards of greedy completions"):
        advantages(config, rewards)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("right", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_groups_of_k_that_hold_the_completion(k: int, right: int) -> None:
    row: Row = [1.0 if place < right else 0.0 for place in range(7)]
    expected = oracle.pass_at_k(row, k, 0.5) if 7 - right >= k else [0.0] * 7

    found = advantages(PassAtKAdvantageConfig(k=k), as_array([row]))

    np.testing.assert_allclose(found[0], expected, **EXACT)


def test_pass_at_k_leaves_out_what_was_not_scored_and_takes_a_threshold() -> None:
    row: Row = [0.9, None, 0.2, 0.3, 0.0, None, 0.8]
    few: Row = [1.0, 0.0, 0.0, None, None, None, None]
    config = PassAtKAdvantageConfig(k=3, threshold=0.7)

    found = advantages(config, as_array([row, few]))

    np.testing.assert_allclose(found[0], oracle.pass_at_k(row, 3, 0.7), **EXACT)
    assert found[0][1] == found[0][5] == 0.0
    assert not found[1].any()
    assert without_baseline(config, as_array([row, few])).tolist() == [False, True]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_pass_at_k_of_identical_rewards_is_exactly_zero(reward: float) -> None:
    assert not advantages(PassAtKAdvantageConfig(k=2), np.full((2, 6), reward)).any()


def test_flat_groups_are_told_by_their_range() -> None:
    rewards = np.array(
        [[1.0, 1.0, 1.0], [1.0, 1.0 + 5e-7, 1.0], [1.0, 1.1, 1.0], [1.0, math.nan, 1.0], [1.0, math.nan, 0.0],
         [1.0, math.nan, math.nan], [math.nan] * 3]
    )  # fmt: skip

    assert flat_groups(rewards, 1e-6).tolist() == [True, True, False, True, False, True, True]
    assert flat_groups(rewards, 0.0).tolist() == [True, False, False, True, False, True, True]


def test_normalising_each_reward_first_lets_a_small_one_count() -> None:
    large = np.array([[100.0, 0.0, 100.0, 0.0], [0.0, 0.0, 100.0, 100.0]])
    small = np.array([[0.01, 0.01, 0.0, 0.0], [0.0, 0.01, 0.0, 0.01]])
    weights = {"large": 1.0, "small": 0.5}
    config = GRPOAdvantageConfig(combine="normalise_then_sum", epsilon=1e-9)
    alone = [np.array(oracle.grpo(part.tolist(), 1e-9)) for part in (large, small)]
    total = alone[0] + 0.5 * alone[1]

    found = advantages(config, large + 0.5 * small, {"large": large, "small": small, "logged": small}, weights)

    np.testing.assert_allclose(found, total / (np.std(total, ddof=1) + 1e-9), **EXACT)
    summed = advantages(GRPOAdvantageConfig(epsilon=1e-9), large + 0.5 * small)
    assert abs(summed[0, 0] - summed[0, 2]) < 1e-3
    assert found[0, 0] - found[0, 2] > 0.3


def test_a_reward_that_says_nothing_of_a_completion_moves_it_neither_way() -> None:
    first = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    second = np.array([[math.nan] * 3, [0.0, 1.0, math.nan]])
    rewards = np.array([[1.0, 0.0, 1.0], [0.0, 2.0, math.nan]])
    config = GRPOAdvantageConfig(combine="normalise_then_sum")

    found = advantages(config, rewards, {"a": first, "b": second}, {"a": 1.0, "b": 1.0})

    assert found[0, 0] == pytest.approx(found[0, 2])
    assert found[0, 0] > 0 > found[0, 1]
    assert found[1, 2] == 0.0
    assert found[1, 1] > 0 > found[1, 0]


def test_rewards_that_cancel_leave_no_noise_behind() -> None:
    first = np.array([[0.1, 0.7, 0.3], [0.2, 0.9, 0.4]])
    config, weights = GRPOAdvantageConfig(combine="normalise_then_sum"), {"a": 0.1, "b": 0.2, "c": -0.3}

    found = advantages(config, 0 * first, dict.fromkeys("abc", first), weights)

    np.testing.assert_allclose(found, 0.0, atol=1e-9)


def test_normalising_first_asks_for_the_rewards_by_name() -> None:
    config = GRPOAdvantageConfig(combine="normalise_then_sum")

    with pytest.raises(ValueError, match="needs each reward and its weight by name"):
        advantages(config, np.zeros((1, 2)))
