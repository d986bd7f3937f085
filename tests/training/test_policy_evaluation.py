"""What an evaluation of a policy says of completions that could not be scored: they are neither right nor wrong."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from holdfast.training.policy.evaluate import solved_metrics

NAN = float("nan")
REWARDS = [[1.0, 0.0, NAN, 1.0], [0.0, 0.0, 0.0, 0.0], [NAN, NAN, 1.0, 0.5], [NAN, NAN, NAN, NAN]]


def any_of_k_is_right(row: list[float], k: int) -> list[bool]:
    """Return, for every choice of k scored completions, whether one of them reaches 1."""
    scored = [reward for reward in row if not np.isnan(reward)]
    return [max(chosen) >= 1.0 for chosen in combinations(scored, k)]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_scored_completions(k: int) -> None:
    found = solved_metrics(np.array(REWARDS), 1.0)

    shares = [np.mean(choices) for row in REWARDS if (choices := any_of_k_is_right(row, k))]
    assert found[f"pass@{k}"] == pytest.approx(np.mean(shares), abs=1e-12)


def test_accuracy_and_average_are_those_of_scored_completions() -> None:
    found = solved_metrics(np.array(REWARDS), 1.0)

    assert found["accuracy"] == pytest.approx(3 / 9, abs=1e-12)
    assert found["avg@4"] == pytest.approx(3.5 / 9, abs=1e-12)


def test_where_too_few_are_scored_nothing_is_said() -> None:
    one_each = np.array([[1.0, NAN], [NAN, 0.0]])

    assert solved_metrics(one_each, 1.0) == {"accuracy": 0.5, "avg@2": 0.5, "pass@1": 0.5}
    assert solved_metrics(np.full((2, 2), NAN), 1.0) == {}
