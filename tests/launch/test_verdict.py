"""The table of verdicts: each row by a case written by hand, and the whole over every combination of facts."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from holdfast.launch.verdict import Death, Verdict, judge
from holdfast.parallel.failure.reports import Failure

NO_STOP, FIRST, SECOND = (False, False), (True, False), (True, True)


def end(code, kind=None, by_launcher=False):
    return code, kind, by_launcher


def outcome(stop, *ends, lost=False):
    """The outcome of ranks that ended in the order of their numbers; `lost` adds a report that names no rank."""
    deaths = [
        Death(rank, code, rank, "update", kind and Failure(rank, kind, "", "Error", "", 3, rank), "", by_launcher)
        for rank, (code, kind, by_launcher) in enumerate(ends)
    ]
    reports = [death.report for death in deaths if death.report is not None]
    reports += [Failure(-1, "silent", "", "Death", "", 3, 0.0)] if lost else []
    return judge(deaths, reports, stop_requested=stop[0], stop_now=stop[1])


KILLED = end(-SIGKILL, by_launcher=True)
CASES = [
    ("a rank was refused, and none failed", NO_STOP, [KILLED, end(2)], 2, 1),
    ("a rank was refused, and none failed", NO_STOP, [end(0), end(-SIGKILL, "user", by_launcher=True)], 2, 1),
    ("a rank was refused, and none failed", SECOND, [end(2), end(2, "user")], 2, 0),
    ("a second signal, and every rank ended with 0", SECOND, [end(0), end(0, "peer")], 0, None),
    ("a second signal", SECOND, [end(0), end(0, "error")], 3, None),
    ("a second signal", SECOND, [end(2, "user"), end(1, "error")], 3, None),
    ("a second signal", SECOND, [end(0), KILLED], 3, None),
    ("a first signal, and every rank ended with 0", FIRST, [end(0, "peer"), end(0, by_launcher=True)], 0, None),
    ("a first signal, and no rank ended by itself for another reason", FIRST, [end(0), end(3, "peer")], 3, None),
    ("a first signal, and no rank ended by itself for another reason", FIRST, [end(-SIGINT), end(130)], 3, None),
    ("a first signal, and no rank ended by itself for another reason", FIRST, [end(-SIGTERM), end(143)], 3, None),
    ("a first signal, and no rank ended by itself for another reason", FIRST, [end(0), KILLED], 3, None),
    ("a rank reports something, or was ended by the launcher", NO_STOP, [end(3, "peer"), end(1, "error")], 3, 1),
    ("a rank reports something, or was ended by the launcher", NO_STOP, [end(2, "user"), end(1, "error")], 3, 0),
    (
        "a rank reports something, or was ended by the launcher",
        NO_STOP,
        [end(2, by_launcher=True), end(-SIGKILL)],
        3,
        1,
    ),
    ("a rank reports something, or was ended by the launcher", NO_STOP, [end(0), end(0, "peer")], 3, 0),
    ("a rank reports something, or was ended by the launcher", FIRST, [end(0), end(0, "error")], 3, 1),
    ("a rank ended out of order, without a report", NO_STOP, [end(0), end(-SIGTERM)], 3, 1),
    ("a rank ended out of order, without a report", FIRST, [end(3), end(-SIGHUP)], 3, 1),
    ("a rank ended out of order, without a report", FIRST, [end(1), end(4)], 3, 0),
    ("a rank has no result", NO_STOP, [end(4), end(3), end(0)], 1, None),
    ("a rank has no result", FIRST, [end(4), end(0)], 1, None),
    ("a rank stopped early", NO_STOP, [end(3), end(0)], 3, None),
    ("every rank ended with 0", NO_STOP, [end(0), end(0)], 0, None),
]


@pytest.mark.cases("all")
@pytest.mark.parametrize(("row", "stop", "ends", "exit_code", "told"), CASES)
def test_a_case_is_judged_by_its_row(row, stop, ends, exit_code, told):
    verdict, decided, rank = outcome(stop, *ends)

    assert decided == row
    assert verdict.exit_code == exit_code
    assert (rank and rank.rank) == told
    assert (verdict is Verdict.DIED) == ("reports something" in row or "out of order" in row)


def test_each_combination_of_facts_has_one_outcome_whatever_the_order_of_the_ranks():
    codes = (0, 1, 2, 3, 4, -SIGINT, -SIGKILL, 143)
    ends = list(product(codes, (None, "error", "user", "peer", "silent"), (False, True)))
    rows = set()

    pairs = combinations_with_replacement(ends, 2)
    for (first, second), stop, lost in product(pairs, (NO_STOP, FIRST, SECOND), (False, True)):
        verdict, row, told = outcome(stop, first, second, lost=lost)
        rows.add(row)

        assert outcome(stop, second, first, lost=lost)[:2] == (verdict, row)
        assert (told is not None) == (verdict in {Verdict.REFUSED, Verdict.DIED})

    assert rows == {row for row, *_ in CASES}
