"""What a landing leaves out of the deep and the device lanes: `pytest --landing`.

A test stays where the recorded map (tools/record_map.py) says that it enters a file that changed since the last
landing, where the map does not know it, and in one landing of four by turns. Where it cannot be told what changed, or
a changed file of src is entered by no test, all stay. The nightly workflow and `make test-all` run all in any case.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tools.record_map import EnteredMap, changed_files, function_of, read_map

from tests.lanes import folder_of

ROOT = Path(__file__).parents[1]
TURNS = 4
SELECTED = {"deep", "devices", "slow"}
"""Marks of the tests that a landing may leave out."""
EVERYWHERE = (
    "tests/conftest.py",
    "tests/lanes.py",
    "tests/selection.py",
    "constraints.txt",
    "pyproject.toml",
)
"""Files that may change any test."""

_summary: list[str] = []


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--landing", action="store_true", help="leave out deep tests that enter nothing that changed")


def base_commit() -> str | None:
    """Return the commit that landed last: what the environment says, else what `.ci/landed` does."""
    landed = ROOT / ".ci" / "landed"
    return os.environ.get("HOLDFAST_BASE") or (landed.read_text().strip() if landed.exists() else None)


def turn() -> int:
    """Return which quarter runs in any case: the number of commits, by turns."""
    count = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(count.stdout or 0) % TURNS


def why_all(entered: EnteredMap | None, changed: list[str] | None) -> str:
    """Return why nothing is left out; "" where the map can choose."""
    if changed is None:
        return "it is not known what changed since the last landing"
    if entered is None:
        return "no map is recorded"
    if everywhere := [path for path in changed if path in EVERYWHERE]:
        return f"{everywhere[0]} changed"
    sources = {path.removeprefix("src/holdfast/") for path in changed if path.startswith("src/holdfast/")}
    unknown = sorted(path for path in sources - entered.known_files() if path.endswith(".py"))
    return f"no test is known to enter {unknown[0]}" if unknown else ""


def stays(test: str, entered: EnteredMap, changed: list[str], quarter: int) -> bool:
    """Return whether a test function runs on this landing."""
    file = test.partition("::")[0]
    if test not in entered.files or zlib.crc32(test.encode()) % TURNS == quarter:
        return True
    # Helpers beside a test, or in the folders above it, may change what it does.
    helpers = [path for path in changed if path.startswith("tests/") and not Path(path).name.startswith("test_")]
    if file in changed or any(file.startswith(f"{Path(path).parent}/") for path in helpers):
        return True
    return any(path.removeprefix("src/holdfast/") in entered.files[test] for path in changed)


@pytest.hookimpl(trylast=True)  # behind the lanes
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if not config.option.landing:
        return
    base, entered = base_commit(), read_map()
    changed = None if base is None else changed_files(base)
    if reason := why_all(entered, changed):
        _summary.append(f"landing: all tests run, since {reason}")
        return
    assert entered is not None
    assert changed is not None
    quarter = turn()
    gone = [
        item
        for item in items
        if SELECTED & {mark.name for mark in item.iter_markers()}
        and not stays(function_of(item.nodeid), entered, changed, quarter)
    ]
    removed = set(map(id, gone))
    items[:] = [item for item in items if id(item) not in removed]
    config.hook.pytest_deselected(items=gone)
    rooms = sorted(Counter(folder_of(item.nodeid) for item in gone).items())
    _summary.append(
        f"landing: {len(gone)} tests left out, which enter nothing that changed since {str(base)[:12]} and are not in "
        f"quarter {quarter} of {TURNS}: {', '.join(f'{room} {count}' for room, count in rooms) or 'none'}"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _summary:
        terminalreporter.write_line(line)
