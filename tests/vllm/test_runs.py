"""Whole runs on two FSDP2 ranks that sample from two servers of vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.vllm.conftest import Fleet, tree_of

REWARD = """
def even(completion_tokens, **_):
    return sum(token % 2 == 0 for token in completion_tokens) / len(completion_tokens)
"""


def start(file: Path) -> subprocess.Popen[str]:
    """Start a run as a user does."""
    command = [sys.executable, "-m", "holdfast.cli.main", "grpo", str(file)]
    return subprocess.Popen(command, cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(directory: Path) -> list[dict[str, Any]]:
    """Return what a run has told of its steps so far."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_that_is_killed_goes_on_and_samples_from_its_own_weights_alone(fleet: Fleet, tmp_path: Path) -> None:
    tree = tree_of(
        fleet.urls,
        steps=10,
        run={"dir": str(tmp_path), "name": "killed"},
        launch={"ranks": 2, "device": "cpu"},
        checkpoint={"every_steps": 2, "rehearsal": {"enabled": False}},
        reward="reward.py:even",
        optim={"lr": 3e-3, "schedule": "constant"},
        data={"batch_size": 8},
    )
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    directory = tmp_path / "killed"

    first = start(tmp_path / "run.yaml")
    deadline = time.monotonic() + 300
    while (
        first.poll() is None
        and time.monotonic() < deadline
        and not any(e.get("step", 0) >= 5 for e in lines(directory))
    ):
        time.sleep(0.05)
    ranks = [
        each for each in psutil.Process(first.pid).children(recursive=True) if "holdfast.cli.worker" in each.cmdline()
    ]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    broken = first.communicate(timeout=120)[0]
    second = start(tmp_path / "run.yaml")
    ended = second.communicate(timeout=300)[0]

    assert first.returncode == 3, broken
    assert second.returncode == 0, ended
    assert "weights pushed to 2 of 2 servers and proved" in ended
    told = {entry["step"]: entry for entry in lines(directory) if "loss" in entry}
    assert sorted(told) == list(range(1, 11))
    assert max(entry["sampling/sampling_logp_difference/mean"] for entry in told.values()) < 1e-5
    assert told[10]["reward"] > told[1]["reward"]
