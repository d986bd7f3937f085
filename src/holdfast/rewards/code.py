"""The code reward: runs a completion's Python against the row's tests, in a process with limits.

No security boundary. The code runs as this user: limits keep an accident small, they do not keep an attacker out.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.rewards import processes
from holdfast.rewards.base import Sample
from holdfast.rewards.rules import cell

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_RUNNER = Path(__file__).with_name("code_runner.py")


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
        blocks = _BLOCK.findall(sample.completion)
        passed = self._passed(blocks[-1], tests) if blocks else 0
        share = passed / len(tests)
        return {"reward": share if self.grade == "share" else float(passed == len(tests)), "passed": share}

    def _passed(self, code: str, tests: Sequence[str]) -> int:
        """Run the code and its tests; return how many pass."""
        # Code that ends its process early prints nothing behind this word, and so passes nothing.
        word = secrets.token_hex(16)
        order = {"code": code, "tests": tests, "word": word, "memory_bytes": self.memory_mib << 20,
                 "cpu_seconds": int(self.timeout_seconds) + 1}  # fmt: skip
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-code-", ignore_cleanup_errors=True) as folder,
            # A file, which the size limit bounds; a pipe would fill the worker's memory.
            tempfile.TemporaryFile() as said,
        ):
            process = subprocess.Popen(
                [sys.executable, "-I", str(_RUNNER)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},  # no keys for the code to read
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(order).encode(), self.timeout_seconds)
            except subprocess.TimeoutExpired:
                return 0
            finally:
                processes.kill_with_group(process.pid)
                process.communicate()
            said.seek(0)
            heading, _, count = said.read(200).decode(errors="replace").partition(" ")
        return int(count) if heading == word else 0
