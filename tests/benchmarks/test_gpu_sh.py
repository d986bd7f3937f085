"""benchmarks/gpu.sh on a CPU: its parts, its table and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


def gpu_sh(out: Path, *parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with tiny shapes."""
    environment = {**os.environ, "TINY": "1", "OUT": str(out), "PYTHON": sys.executable, "ROUNDS": "1", **variables}
    return subprocess.run([SCRIPT, *parts], env=environment, capture_output=True, text=True, check=False)


def test_a_part_that_does_not_exist_is_refused_with_the_names_of_those_that_do(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path / "out", "head", "tail")

    assert done.returncode == 2
    assert "no part tail" in done.stderr and "sft_05b" in done.stderr and "recipes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_parts_that_need_a_card_or_a_model_say_so_in_the_table(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path, "tests", "learning", REAL_MODEL="")

    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()[4:]
    assert rows == [
        "| tests | | | skipped: they need a CUDA device | |",
        "| learning | | | skipped: it needs REAL_MODEL, a directory that examples/real/smollm2.py wrote | |",
    ]


@pytest.mark.slow  # five processes that import torch, one after the other
def test_a_part_that_fails_does_not_stop_the_next_and_is_named_at_the_end(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path, "learning", "head", REAL_MODEL=str(tmp_path / "nowhere"))

    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("failed or missed a target: learning;")
    table = (tmp_path / "table.md").read_text()
    assert "| learning | exit code 1: it failed or missed a target, see learning.txt | | | **missed** |" in table
    assert "| head | hidden size 32: time, one_pass over full logits | <= 1.0 | worst " in table
    assert "There is no directory" in (tmp_path / "learning.txt").read_text()
