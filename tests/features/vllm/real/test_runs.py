"""Whole runs on two FSDP2 ranks that sample from two servers of vLLM."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from holdfast.features.vllm.processes import is_well
from tests.features.vllm.real.conftest import Fleet, tree_of

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


WORLD = """
from holdfast.environments.base import Observation
class World:
    def begin(self, row):
        self.lasts = 1 + len(row["prompt"]) % 3
    def step(self, turn):
        even = sum(ord(character) % 2 == 0 for character in turn.text) / max(1, len(turn.text))
        return Observation("and now?", even, turn.number + 1 == self.lasts)
"""


def ten_steps(fleet: Fleet, tmp_path: Path, staleness: int) -> Path:
    """Write a run of ten steps, and return its directory."""
    tree = tree_of(
        fleet.urls,
        steps=10,
        run={"dir": str(tmp_path), "name": "ten"},
        launch={"ranks": 2, "device": "cpu"},
        checkpoint={"every_steps": 2, "rehearsal": False},
        reward="reward.py:even",
        optim={"lr": 3e-3, "schedule": "constant"},
        data={"batch_size": 8},
        rollout={"max_staleness": staleness, "record": True},
        correction={"kind": "truncate"},
    )
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "ten"


def reaches(process: subprocess.Popen[str], directory: Path, step: int) -> None:
    """Wait until a run has made a step, or ended."""
    deadline = time.monotonic() + 300
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not any(entry.get("step", 0) >= step for entry in lines(directory))
    ):
        time.sleep(0.05)


def check(directory: Path, staleness: int) -> None:
    """Check that ten steps learned, each from weights as old as was allowed."""
    told = {entry["step"]: entry for entry in lines(directory) if "loss" in entry}
    assert sorted(told) == list(range(1, 11))
    assert told[10]["reward"] > told[1]["reward"]
    for step in told:
        with gzip.open(directory / "rollouts" / f"step-{step:08d}.jsonl.gz", "rt") as file:
            completions = [one for line in [*file][1:] for one in json.loads(line)["completions"]]
        ages = {step - 1 - version for one in completions for _, version in one["versions"]}
        assert ages <= {0, staleness}, (step, ages)
        if ages == {0}:
            assert told[step]["sampling/sampling_logp_difference/max"] <= 1e-4
    if staleness == 0:
        assert max(entry["sampling/sampling_logp_difference/mean"] for entry in told.values()) < 1e-5


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_is_killed_goes_on_and_samples_from_its_own_weights_alone(
    fleet: Fleet, tmp_path: Path, staleness: int
) -> None:
    directory = ten_steps(fleet, tmp_path, staleness)

    first = start(tmp_path / "run.yaml")
    reaches(first, directory, 5)
    ranks = [
        each for each in psutil.Process(first.pid).children(recursive=True) if "holdfast.launch.rank" in each.cmdline()
    ]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    broken = first.communicate(timeout=120)[0]
    second = start(tmp_path / "run.yaml")
    ended = second.communicate(timeout=300)[0]

    assert first.returncode == 3, broken
    assert second.returncode == 0, ended
    assert "weights pushed to 2 of 2 servers in" in ended
    check(directory, staleness)


def test_a_run_of_episodes_trains_ten_steps_under_the_log_probabilities_of_its_servers(
    fleet: Fleet, tmp_path: Path
) -> None:
    directory = ten_steps(fleet, tmp_path, 0)
    (tmp_path / "world.py").write_text(WORLD)
    tree = yaml.safe_load((tmp_path / "run.yaml").read_text())
    tree |= {"environment": {"path": "world.py:World", "on_cut": "continue"}, "reward": "environment"}
    tree |= {"groups": {"truncated": "keep"}, "correction": "off"}
    tree["rollout"]["max_new_tokens"] = 12
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))

    process = start(tmp_path / "run.yaml")
    ended = process.communicate(timeout=600)[0]

    assert process.returncode == 0, ended
    told = {entry["step"]: entry for entry in lines(directory) if "loss" in entry}
    assert sorted(told) == list(range(1, 11))
    assert {entry["environment/turns/max"] for entry in told.values()} == {3.0}
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in told.values()) <= 1e-4
    for step in told:
        with gzip.open(directory / "rollouts" / f"step-{step:08d}.jsonl.gz", "rt") as file:
            completions = [one for line in [*file][1:] for one in json.loads(line)["completions"]]
        assert {version for one in completions for _, version in one["versions"]} == {-1, step - 1}, "-1 was observed"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_server_is_killed_goes_on_with_the_other_and_has_it_back(
    fleet: Fleet, tmp_path: Path, staleness: int
) -> None:
    directory = ten_steps(fleet, tmp_path, staleness)

    process = start(tmp_path / "run.yaml")
    reaches(process, directory, 3)
    os.kill(fleet.servers.processes[1].pid, signal.SIGKILL)
    ended = process.communicate(timeout=600)[0]
    deadline = time.monotonic() + 300
    while not is_well(fleet.urls[1]) and time.monotonic() < deadline:
        time.sleep(0.5)

    assert process.returncode == 0, ended
    assert fleet.urls[1] in ended  # it is named
    check(directory, staleness)
    assert is_well(fleet.urls[1])
