"""How long each suite took, beside the minutes it may take, at the end of a run of the tests.

Minutes of workers, which run beside each other: two of them take half the time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

MINUTES = {"units": 4, "commands": 18, "distributed": 16, "faults": 18, "architectures": 6, "demo": 6}
SUITES = {
    "distributed": "distributed",
    "training": "distributed",
    "failures": "distributed",
    "checkpoint": "faults",
    "crash": "faults",
    "launch": "faults",
    "cli": "commands",
    "rewards": "commands",
    "models": "architectures",
    "rollout": "architectures",
    "examples": "demo",
    "docs": "demo",
}
"""Folder of tests to suite; the rest are units."""

_FILES_SHOWN = 12

_seconds: Counter[str] = Counter()
_of_files: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    parts = report.nodeid.split("/")
    _seconds[SUITES.get(parts[1] if len(parts) > 2 else "", "units")] += report.duration
    _of_files[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if sum(_seconds.values()) > 60:
        told = [f"{suite} {_seconds[suite] / 60:.1f} of {minutes}" for suite, minutes in MINUTES.items()]
        terminalreporter.write_line(f"minutes per suite: {', '.join(told)}")
        longest = [f"{file} {seconds / 60:.1f}" for file, seconds in _of_files.most_common(_FILES_SHOWN)]
        terminalreporter.write_line(f"minutes of the longest files: {', '.join(longest)}")
