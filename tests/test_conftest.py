"""Which cases of a function stay in `make test`."""

from __future__ import annotations

import os
from itertools import combinations, product

import pytest

from tests.conftest import covering, spread


@pytest.mark.parametrize(
    ("number", "total", "stay"),
    [(2, 2, {0, 1}), (2, 5, {0, 4}), (3, 5, {0, 2, 4}), (4, 10, {0, 3, 6, 9}), (1, 3, {0})],
)
def test_cases_that_stay_reach_from_the_first_to_the_last(number: int, total: int, stay: set[int]) -> None:
    assert spread(number, total) == stay


@pytest.mark.parametrize(("sizes", "most"), [((2, 2, 2), 4), ((3, 3, 3), 11), ((4, 2), 8), ((2, 2, 2, 2), 7)], ids=str)
def test_few_cases_have_every_pair_of_values(sizes: tuple[int, ...], most: int) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]

    stay = covering(cases)

    of_all, of_those = (
        {pair for case in chosen for pair in combinations(sorted(case.items()), 2)}
        for chosen in (cases, [cases[place] for place in stay])
    )
    assert of_those == of_all
    assert len(stay) <= most


def test_cases_of_one_argument_have_no_pairs() -> None:
    assert covering([{"a": 0}, {"a": 1}]) == set()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
@pytest.mark.xdist_group("together")
def test_a_group_stands_in_the_name_by_which_tests_are_given_to_workers(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@together")
