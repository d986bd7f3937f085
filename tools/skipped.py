"""Prints every test that would be skipped on this machine, and why: `python tools/skipped.py`.

A release is checked where nothing is: what is skipped was not seen to work. Tests that decide while they run, such as
those that need a file beside the checkout, show only in the output of `make test-all`.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.skipping import evaluate_skip_marks

ROOT = Path(__file__).parents[1]


class Skipped:
    """Collects the reasons of tests that would be skipped."""

    def __init__(self) -> None:
        self.by_reason: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Look at every test that was collected."""
        for item in items:
            skipped = evaluate_skip_marks(item)
            if skipped is not None:
                self.by_reason[skipped.reason].append(item.nodeid)
            elif item.get_closest_marker("gpu") is not None:
                self.by_reason["needs a CUDA device; benchmarks/gpu.sh tests"].append(item.nodeid)


def main() -> int:
    """Collect all tests without running them; print those that would be skipped, by reason."""
    plugin = Skipped()
    addopts = "addopts=--strict-markers -p no:cacheprovider"
    options = ["--collect-only", "-qqq", "-o", addopts, "--rootdir", str(ROOT), str(ROOT / "tests")]
    with contextlib.redirect_stdout(io.StringIO()) as listing:
        code = pytest.main(options, plugins=[plugin])
    if code:
        print(listing.getvalue())
    for reason, tests in sorted(plugin.by_reason.items()):
        print(f"{len(tests)} skipped: {reason}")
        for test in tests:
            print(f"    {test}")
    print(f"{sum(map(len, plugin.by_reason.values()))} tests would be skipped on this machine")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
