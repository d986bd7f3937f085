"""A plan that is ended leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from holdfast.files import python_module

ROOT = Path(__file__).parents[3]
SECONDS = 60


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_that_executes_a_plan_ends_with_the_command(tmp_path: Path, number: int) -> None:
    command = [
        *python_module("holdfast.cli.main"),
        "plan",
        str(ROOT / "examples" / "sft_sort.yaml"),
        "--device",
        "h100",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + SECONDS
        while not (children := psutil.Process(running.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)  # the child has begun

        running.send_signal(number)
        running.wait(SECONDS)

        gone, alive = psutil.wait_procs(children, timeout=SECONDS)
        assert len(gone) == 1
        assert alive == []
