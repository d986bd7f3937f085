"""What takes minutes: planted device bugs, and lines for GPUs alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fake_devices.conftest import ROOT, needs_guard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def tool(*arguments: str) -> str:
    needs_guard()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_every_planted_device_bug_is_noticed() -> None:
    assert "20 of 20 noticed" in tool("tools/device_bugs.py", "planted")


def test_nine_of_ten_drawn_device_bugs_are_noticed() -> None:
    assert "of 10 noticed, at least 9" in tool("tools/device_bugs.py", "drawn", "--seed", "19", "--count", "10")


def test_lines_for_gpus_alone_are_executed_or_have_a_reason() -> None:
    assert "NO REASON GIVEN" not in tool("tools/cuda_lines.py", "run")
