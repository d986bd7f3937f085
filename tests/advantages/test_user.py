"""A user's own function of advantages: what it is given, and what is made of what it gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.advantages.user import AdvantageFailed, Groups, user_advantages

REWARDS = np.array([[1.0, 0.0, math.nan], [0.5, 0.25, 1.0]])
GROUPS = Groups(REWARDS, {"right": REWARDS / 2}, np.array([[5.0, 7.0, 2.0], [1.0, 1.0, 9.0]]))


def test_a_function_sees_rewards_parts_and_lengths_and_decides_alone() -> None:
    def function(groups: Groups) -> list[list[float]]:
        return (groups.rewards * 2 - groups.parts["right"] + groups.lengths).tolist()

    made = user_advantages(function, GROUPS, "own.py:f")

    np.testing.assert_array_equal(made, [[6.5, 7.0, 0.0], [1.75, 1.375, 10.5]])
    assert made.dtype == np.float64


def test_what_a_function_does_to_its_arrays_is_seen_by_nobody() -> None:
    def function(groups: Groups) -> Any:
        groups.rewards[:] = 3.0
        groups.parts["right"][:] = 3.0
        groups.lengths[:] = 3.0
        return groups.rewards

    user_advantages(function, GROUPS, "own.py:f")

    np.testing.assert_array_equal(GROUPS.rewards, [[1.0, 0.0, math.nan], [0.5, 0.25, 1.0]])
    np.testing.assert_array_equal(GROUPS.parts["right"], GROUPS.rewards / 2)
    assert GROUPS.lengths[1, 2] == 9.0


def fails(_: Groups) -> None:
    raise KeyError("score\nof a row")


class Mute(Exception):  # noqa: N818 - a user's name
    """Fails when it is asked what is wrong."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def fails_mutely(_: Groups) -> None:
    raise Mute


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fails_mutely, r"completions each, raises Mute: \(its text raises ZeroDivisionError\). It must return"),
        (fails, "given the rewards of 2 prompts with 3 completions each, raises KeyError: 'score.nof a row'"),
        (lambda groups: sys.exit("no groups"), "raises SystemExit: no groups"),
        (lambda groups: groups.rewards[0], r"an array of shape \[3\] for rewards of shape \[2, 3\]"),
        (lambda groups: groups.rewards.T, r"an array of shape \[3, 2\]"),
        (lambda groups: 1.0, r"an array of shape \[\]"),
        (lambda groups: None, r"an array of shape \[\]"),
        (lambda groups: [[1.0], [1.0, 2.0]], "raises ValueError"),
        (lambda groups: {"a": 1}, "raises TypeError"),
        (lambda groups: groups.rewards / 0 * 0, "gave nan for 5 of 5 scored completions, the first of them number 0"),
        (lambda groups: np.where(groups.rewards == 0.25, -np.inf, 0), "gave -inf for 1 of 5 .* number 1 of prompt 1"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_cannot_be_trained_on_is_told_in_one_paragraph(function: Callable[[Groups], Any], said: str) -> None:
    with pytest.raises(AdvantageFailed, match=said) as raised:
        user_advantages(function, GROUPS, "own.py:f")

    assert str(raised.value).startswith("advantage.path own.py:f")
    assert "\n" not in str(raised.value)
