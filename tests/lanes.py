"""Which tests `make test` runs, and which wait for `make test-deep` or `make test-all`.

A test is in one lane. Those marked `slow` or `gpu` are run by their targets, those marked `deep` by `make test-deep`,
and the rest by `make test`. Of a function that starts processes, as its fixtures show, two cases stay in `make test`,
the first and the last; the others are deep. The mark `cases(n)` keeps n of them, spread evenly, and `cases("all")`
keeps all: those whose numbers come from different formulas, and kills of different phases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

LANES = {
    "test": "not slow and not gpu and not deep and not devices",
    "test-deep": "deep and not slow and not gpu and not devices",
    "test-devices": "devices and not slow and not gpu",
    "slow": "slow and not gpu",
    "gpu": "gpu",
}
"""Lane to the marks it selects in the Makefile; `make test-all` runs all but the last."""

PROCESSES = {"pools", "warm", "holdfast", "trained", "ground", "server"}
"""Fixtures that start processes."""

UNITS = {"advantages", "batching", "config", "data", "metrics", "objectives", "optim", "parallel", "features/report"}
"""Folders of tests whose subject needs neither processes nor runs: `make unit`."""

CASES = 2

_counts: Counter[str] = Counter()


def parametrized(marks: Iterable[Any]) -> set[str]:
    """Return the arguments that the marks `parametrize` give a test themselves; a fixture of that name is not used."""
    direct = [mark.args[0] for mark in marks if not mark.kwargs.get("indirect")]
    return {name.strip() for names in direct for name in (names.split(",") if isinstance(names, str) else names)}


def lane_of(marks: set[str]) -> str:
    """Return the lane of a test that has these marks."""
    named = {"gpu": "gpu", "slow": "slow", "devices": "test-devices", "deep": "test-deep"}
    return next((lane for mark, lane in named.items() if mark in marks), "test")


def spread(cases: int, total: int) -> set[int]:
    """Return which of `total` cases stay at hand: the first, the last, and some between them."""
    if cases >= total:
        return set(range(total))
    return {round(place * (total - 1) / max(cases - 1, 1)) for place in range(cases)}


def cases_at_hand(item: Any) -> int | None:
    """Return how many cases of this one's function stay in `make test`; None: all."""
    own = item.get_closest_marker("cases")
    if own is not None:
        return None if own.args[0] == "all" else int(own.args[0])
    fixtures = {*item.fixturenames} - parametrized(item.iter_markers("parametrize"))
    return CASES if PROCESSES & fixtures else None


def folder_of(nodeid: str) -> str:
    """Return the folder of a test below `tests`, of a feature's with the feature; "" of one that lies in none."""
    folders = nodeid.partition("::")[0].split("/")[1:-1]
    return "/".join(folders[:2] if folders[:1] == ["features"] else folders[:1])


def is_unit(item: Any) -> bool:
    """Return whether a test is of a folder of pure code and starts no process by a fixture."""
    return folder_of(item.nodeid) in UNITS and not PROCESSES & (
        {*item.fixturenames} - parametrized(item.iter_markers("parametrize"))
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[Any]) -> None:
    functions = defaultdict(list)
    for item in items:
        if is_unit(item):
            item.add_marker("unit")
        lane = lane_of({mark.name for mark in item.iter_markers()})
        _counts[lane] += 1
        if lane == "test":
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        number = cases_at_hand(cases[0])
        stay = spread(len(cases) if number is None else number, len(cases))
        for place, item in enumerate(cases):
            if place not in stay:
                item.add_marker("deep")
                _counts.update({"test": -1, "test-deep": 1})


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if config.option.collectonly:
        counts = ", ".join(f"{lane} {_counts[lane]}" for lane in LANES)
        terminalreporter.write_line(f"tests per lane: {counts}; {_counts.total()} in all")
