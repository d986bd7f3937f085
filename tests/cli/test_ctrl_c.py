"""Ctrl-C at seeded moments of a start: one paragraph, exit code 3, nothing left, and never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
MOMENTS = 3
"""Of each process in the usual lane; a release looks at more."""


def moments(seed: int, count: int) -> list[float]:
    """Return seconds after the start: Python itself takes the first twentieth of one, in which no code of ours runs."""
    chance = random.Random(seed)
    return [chance.uniform(0.2, 6.0) for _ in range(count)]


def has_environment(pid: str, entry: bytes) -> bool:
    try:
        return entry in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def check_start(directory: Path, tree: dict[str, Any], seconds: float, variables: dict[str, str]) -> None:
    write_run(directory / "run.yaml", tree | {"steps": 100_000, "launch": {"ranks": 1, "device": "cpu"}})
    before = {path.name for path in directory.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "sft", "run.yaml"],
        cwd=directory,
        env=os.environ | variables | {"TEST_CTRL_C": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 3, (seconds, err)
    assert "Traceback" not in out + err
    assert "Exception ignored" not in out + err
    assert len([line for line in err.splitlines() if "Ctrl-C" in line]) == 1 or "stopped by Ctrl-C" in out
    mark = f"TEST_CTRL_C={directory}".encode()
    assert [pid for pid in os.listdir("/proc") if pid.isdecimal() and has_environment(pid, mark)] == []  # noqa: PTH208
    if "step 1/" not in out and "after step" not in out:
        assert {path.name for path in directory.iterdir()} - before <= {"runs"}
        assert not list(directory.glob("runs/.*"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", moments(0, MOMENTS))
def test_ctrl_c_at_any_moment_of_a_start(tmp_path: Path, tree: dict[str, Any], seconds: float) -> None:
    check_start(tmp_path, tree, seconds, {})


@pytest.mark.parametrize("seconds", moments(1, MOMENTS))
def test_ctrl_c_at_any_moment_of_a_rank_that_somebody_else_starts(
    tmp_path: Path, tree: dict[str, Any], seconds: float
) -> None:
    check_start(tmp_path, tree, seconds, ALONE | {"MASTER_PORT": str(20_000 + os.getpid() % 10_000)})


@pytest.mark.slow
@pytest.mark.parametrize("seconds", moments(2, 30))
@pytest.mark.parametrize("variables", [{}, ALONE], ids=["launcher", "rank"])
def test_ctrl_c_at_many_moments(
    tmp_path: Path, tree: dict[str, Any], seconds: float, variables: dict[str, str]
) -> None:
    port = {"MASTER_PORT": str(30_000 + os.getpid() % 10_000)} if variables else {}
    check_start(tmp_path, tree, seconds, variables | port)
