"""`tools/distance.py`: every window of its table opens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.distance import WINDOWS, unseen

ROOT = Path(__file__).parents[1]


def test_a_window_that_no_call_opened_is_named() -> None:
    assert unseen({"save": {"a.py"}, "resume": set()}) == ["step", "resume"]


@pytest.mark.deep
def test_the_step_the_save_and_the_resume_of_both_verbs_are_seen() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "distance.py")], capture_output=True, text=True, timeout=300, check=False
    )

    files = {name: int(number) for name, number in re.findall(r"^(\w+ \w+): (\d+) files", done.stdout, re.MULTILINE)}
    assert done.returncode == 0, done.stderr
    assert set(files) == {f"{verb} {window}" for verb in ("sft", "grpo") for window in WINDOWS}
    assert all(number > 10 for number in files.values())
