"""A game of verifiers, whose own loop asks the policy, trains: `make test-verifiers` installs it and runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("HOLDFAST_VERIFIERS_PYTHON", "")
"""That of an environment with verifiers."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "grpo_verifiers.yaml"


@pytest.mark.timeout(900)  # verifiers starts in every episode, in five seconds
@pytest.mark.skipif(not PYTHON, reason="needs verifiers; make test-verifiers installs it")
def test_three_steps_of_a_game_that_verifiers_plays_are_trained_token_for_token(tmp_path: Path) -> None:
    options = [f"run.dir={tmp_path}", "run.name=game", f"environment.kwargs.python={PYTHON}", "rollout.show=8"]

    command = [sys.executable, "-m", "holdfast.cli.main", "grpo", str(EXAMPLE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "game" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["environment/ended/done"] == 1.0
        assert line["sampling/sampling_logp_difference/max"] <= 1e-5, "the tokens are not those that were sampled"
    samples = [json.loads(line) for line in (tmp_path / "game" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 3
    for sample in samples:
        said = [message["content"] for message in sample["messages"] if message["role"] == "assistant"]
        asked = sample["messages"][0]["content"]
        is_right = said[-1].strip().startswith(chr(ord(asked[-2]) + 1))
        assert sample["reward"] == (1 / len(said) if is_right else 0.0), "verifiers computed another reward"
        assert len(said) == 3 or is_right
