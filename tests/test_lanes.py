"""Every test is in one lane, and the Makefile runs them all."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.budgets import MINUTES, SUITES
from tests.lanes import LANES, lane_of, parametrized, spread

ROOT = Path(__file__).parents[1]
MARKS = ("deep", "slow", "gpu", "devices")


# Tuples, since workers must agree on the names of tests, and sets have another order in each process.
@pytest.mark.parametrize("marks", [marks for number in range(5) for marks in combinations(MARKS, number)], ids=str)
def test_whatever_its_marks_a_test_is_selected_by_one_lane(marks: tuple[str, ...]) -> None:
    selecting = [lane for lane, words in LANES.items() if eval(words, {mark: mark in marks for mark in MARKS})]

    assert selecting == [lane_of({*marks})]


def test_the_makefile_selects_by_the_marks_of_the_lanes() -> None:
    makefile = (ROOT / "Makefile").read_text()

    recipes = re.findall(r"^(test\S*): checks\n\t.*-m \"(.*)\"$", makefile, re.MULTILINE)

    assert dict(recipes) == {lane: LANES[lane] for lane in ("test", "test-deep", "test-devices")} | {
        "test-all": "not gpu and not devices"
    }


def test_ci_runs_all_but_the_slow_lanes() -> None:
    assert "make LANDING=--landing test test-deep test-devices" in (ROOT / ".ci" / "run").read_text()


def test_every_suite_has_minutes_in_both_lanes() -> None:
    for lane in ("test", "test-deep"):
        assert {*SUITES.values(), "units"} == {*MINUTES[lane]}


def test_an_argument_that_has_the_name_of_a_fixture_starts_no_process() -> None:
    marks = [
        pytest.mark.parametrize(("lengths", "trained"), []),
        pytest.mark.parametrize("server, kind", []),
        pytest.mark.parametrize("pools", [], indirect=True),
    ]

    assert parametrized(each.mark for each in marks) == {"lengths", "trained", "server", "kind"}


@pytest.mark.parametrize(
    ("cases", "total", "at_hand"),
    [(2, 1, {0}), (2, 2, {0, 1}), (2, 5, {0, 4}), (3, 5, {0, 2, 4}), (4, 10, {0, 3, 6, 9}), (1, 3, {0})],
)
def test_cases_at_hand_reach_from_the_first_to_the_last(cases: int, total: int, at_hand: set[int]) -> None:
    assert spread(cases, total) == at_hand
