"""What tests start ends with them: pytest is killed, and nothing of what it started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.fixtures import TINY, write_run

ROOT = Path(__file__).parents[1]
SLEEPERS = """
import subprocess, time

def test_inner():
    child = "import subprocess, sys; subprocess.run(['sleep', '{seconds}'])"
    started = [["setsid", "sleep", "{seconds}"], ["setsid", "python3", "-c", child], ["python3", "-c", child]]
    for command in started:
        subprocess.Popen(command)
    time.sleep(1)
    open({started!r}, "w").close()
    time.sleep(600)
"""
RUN = """
import time
from pathlib import Path
from tests.cli.commands import LiveRun

def test_inner():
    run = LiveRun(Path({place!r}))
    run.wait_for_step(1)
    open({started!r}, "w").close()
    time.sleep(600)
"""


def alive(mark: str) -> list[int]:
    """Return the living processes that have a mark in their command or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and mark.encode() in command + environ:
                found.append(int(entry.name))
    return found


def kill_tests_that_have_started(folder: Path, inner: str, mark: str) -> tuple[int, list[int]]:
    """Run tests and kill their process; return how many processes had the mark before, and who still has it later."""
    started, file = folder / "started", folder / "test_inner.py"
    file.write_text(inner)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.conftest", str(file)]
    tests = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    while not started.exists():
        assert tests.poll() is None
        time.sleep(0.05)
    count = len(alive(mark))
    os.kill(tests.pid, signal.SIGKILL)
    tests.wait()
    deadline = time.monotonic() + 20
    while (left := alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return count, left


def test_processes_of_killed_tests_end(tmp_path: Path) -> None:
    seconds = str(100_000 + os.getpid())
    inner = SLEEPERS.format(seconds=seconds, started=str(tmp_path / "started"))

    count, left = kill_tests_that_have_started(tmp_path, inner, seconds)

    assert count >= 5
    assert left == []


@pytest.mark.slow
def test_a_run_of_killed_tests_ends_with_its_ranks(tmp_path: Path) -> None:
    tree = {
        "steps": 100_000,
        "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
        "data": {"synthetic": {"task": "reverse", "rows": 64}, "batch_size": 4, "max_length": 32},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(tmp_path / "run.yaml", tree)
    inner = RUN.format(place=str(tmp_path), started=str(tmp_path / "started"))

    count, left = kill_tests_that_have_started(tmp_path, inner, f"TEST_RUN_MARK={tmp_path}")

    assert count >= 3
    assert left == []
