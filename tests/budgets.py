"""How long each suite took, beside the minutes it may take, at the end of a run of the tests.

Minutes of workers, which run beside each other: three of them take a third of the time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.lanes import LANES, folder_of

MINUTES = {
    "test": {"units": 3, "commands": 7, "distributed": 11, "faults": 6, "architectures": 2, "demo": 1, "devices": 1},
    "test-deep": {
        "units": 1, "commands": 12, "distributed": 13, "faults": 11, "architectures": 2, "demo": 3, "devices": 1
    },
    "test-devices": {"devices": 4},
}  # fmt: skip
"""Lane to suite to minutes of its workers: what is aimed at. A suite that goes over is to be made faster."""
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
    "fake_devices": "devices",
    "features/forensics": "commands",
    "features/trainers": "faults",
    "features/vllm": "architectures",
}
"""Folder of tests to suite; the rest are units."""

_FILES_SHOWN = 12

_seconds: Counter[str] = Counter()
_of_files: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[SUITES.get(folder_of(report.nodeid), "units")] += report.duration
    _of_files[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if sum(_seconds.values()) > 60:
        lane = next((lane for lane, marks in LANES.items() if marks == config.option.markexpr), None)
        budgets = MINUTES.get(lane or "", {})
        suites = [
            f"{suite} {_seconds[suite] / 60:.1f}" + (f" of {budgets[suite]}" if budgets else "")
            for suite in (budgets or MINUTES["test"])
        ]
        terminalreporter.write_line(f"minutes per suite of {lane or 'this run'}: {', '.join(suites)}")
        longest = [f"{file} {seconds / 60:.1f}" for file, seconds in _of_files.most_common(_FILES_SHOWN)]
        terminalreporter.write_line(f"minutes of the longest files: {', '.join(longest)}")
