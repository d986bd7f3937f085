"""`holdfast grpo` with a reference behind a server that fails in the middle: it stops with a sentence, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import write_run
from tests.cli.screens import resumed_at, saved_before_the_error
from tests.cli.warm import Done, WarmPython
from tests.logprob_server import served
from tests.tiny import tiny_directory

OF_STEP = 4 * 4 + 1
"""Requests of a step: one for each completion, and one that sees whether the model is still the same."""
OF_START = 2 * 4 + OF_STEP
"""Requests before step 1: four of each of two ranks, and those of the step that is tried."""


def losses(place: Path, name: str) -> list[tuple[int, float, float]]:
    lines = read_metrics(place / "runs" / name / "metrics.jsonl")
    return [(line["step"], line["loss"], line["kl"]) for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_server_that_fails_stops_the_run_after_its_last_whole_step_and_the_same_command_goes_on(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    model = tiny_directory(tmp_path / "model", "llama")
    (tmp_path / "rewards.py").write_text("def even(completion_ids): return sum(each % 2 for each in completion_ids)\n")

    def run(name: str, reference: dict[str, Any]) -> Done:
        policy = tree | {
            "steps": 3,
            "run": {"name": name},
            "model": {"path": str(model)},
            "reward": {"path": "rewards.py:even"},
            "rollout": {"group_size": 4, "max_new_tokens": 8, "show": 0},
            "kl": {"coefficient": 0.5},
            "reference": reference,
            "optim": {"lr": 0.01},
        }
        write_run(tmp_path / "run.yaml", policy)
        return warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", cwd=tmp_path)

    with served(warm.program, tmp_path / "fault", model) as server:
        section = {"kind": "server", "url": server.url("model"), "attempts": 2}
        missing = run("asked", section | {"url": "http://127.0.0.1:9/v1"})
        server.spoil(f"500 {OF_START + OF_STEP + 5}")
        stopped = run("asked", section)
        kept = sorted(path.name for path in (tmp_path / "runs" / "asked" / "checkpoints").glob("step-*"))
        server.spoil("")
        went_on = run("asked", section)
    straight = run("straight", {"kind": "sharded"})

    assert missing.code == 2, missing.err
    assert missing.err.count("http://127.0.0.1:9/v1 cannot") == 1, "one rank speaks for all"
    assert "Traceback" not in missing.err
    assert stopped.code == 3, stopped.err
    assert stopped.err.count(f" {server.url('model')} answers 500") == 1
    assert "Traceback" not in stopped.err
    assert saved_before_the_error(stopped.out) == 1
    assert kept == ["step-00000001"]
    assert went_on.code == straight.code == 0, went_on.err + straight.err
    assert resumed_at(went_on.out) == 1
    found, expected = losses(tmp_path, "asked"), losses(tmp_path, "straight")
    assert [step for step, _, _ in found] == [1, 2, 3]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
