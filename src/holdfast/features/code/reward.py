"""The code reward: runs a completion's Python code in a process with limits, and the row's tests in another process.

Code and tests run in two processes that exchange only values (`run_tests.py`), so that code is rewarded for the values
that it returns, and cannot pass tests by patching or reading what judges it. This is not a sandbox for hostile code: it
runs as the current user, even as root, with access to files and network. The kernel denies it the environment and the
memory of other processes where it can (`isolation.py`); resource limits contain accidents.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.features.code import folders
from holdfast.features.code.names import TestNames, names_in_tests
from holdfast.processes import kernel
from holdfast.rewards.base import Sample
from holdfast.rewards.functions.rules import cell

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_RUN_TESTS = Path(__file__).with_name("run_tests.py")
_CODE_GRACE_SECONDS = 3.0
"""Beyond a judged program's own limit: for the judge to start, and to end what the code has started."""


@dataclass(frozen=True)
class CodeReward:
    """Scores the last code block of a completion; without one, 0."""

    column: str
    grade: Literal["all", "share"]
    timeout_seconds: float
    memory_mib: int

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Score one sample."""
        tests = cell(sample, self.column)
        tests = [tests] if isinstance(tests, str) else list(tests)
        if not tests:
            raise ValueError(f"the row's column {self.column} holds no test")
        names = names_in_tests(tests)
        blocks = _BLOCK.findall(sample.completion)
        passed = self._passed(blocks[-1], tests, names) if blocks else 0
        share = passed / len(tests)
        return {"reward": share if self.grade == "share" else float(passed == len(tests)), "passed": share}

    def clear(self, pid: int) -> None:
        """Remove the folders that a killed process left."""
        folders.remove_of(pid)

    def _passed(self, code: str, tests: Sequence[str], names: TestNames) -> int:
        """Run the code and its tests; return how many pass."""
        order = {
            "code": code, "tests": tests, "asked": sorted(names.subjects), "supplied": names.supplied,
            "memory_bytes": self.memory_mib << 20,
            "cpu_seconds": int(self.timeout_seconds) + 1, "timeout_seconds": self.timeout_seconds,
        }  # fmt: skip
        with folders.scratch() as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_RUN_TESTS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # a number of the judge's, which the code cannot write to
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},  # no keys for the code to inherit
                start_new_session=True,
            )
            try:
                # The judge keeps the time itself, so that it ends what the code has started.
                longest_seconds = self.timeout_seconds + _CODE_GRACE_SECONDS
                answer, _ = process.communicate(json.dumps(order).encode(), longest_seconds)
            except subprocess.TimeoutExpired:
                return 0
            finally:
                kernel.kill_with_group(process.pid)
                process.communicate()
        return int(answer) if answer.isdigit() else 0


def of_section(section: Mapping[str, Any]) -> CodeReward:
    """Return the reward of a section; folders of processes that were killed are removed."""
    folders.remove_abandoned()
    return CodeReward(section["column"], section["grade"], section["timeout_seconds"], section["memory_mib"])
