"""`holdfast distill` with a teacher behind a server: refused, stopped or killed, the same command goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import write_run
from tests.cli.screens import resumed_at, saved_before_the_error
from tests.cli.test_refusals import everything_in
from tests.cli.warm import Done, WarmPython
from tests.features.served_models.test_reference_server import other_words
from tests.logprob_server import served
from tests.tiny import tiny_directory

OF_START = 2 * 4
"""Requests of two ranks before step 1."""
OF_STEP = 4 + 1
"""Requests of a step: one for each completion, and one that sees whether the model is still the same."""


def distill(warm: WarmPython, place: Path, tree: dict[str, Any], *words: str) -> Done:
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", *words, cwd=place)


@pytest.fixture
def taught(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a distillation on two ranks that lacks a teacher."""
    model = tiny_directory(tmp_path / "model", "llama")
    tiny_directory(tmp_path / "teacher", "llama", seed=5, hidden_size=48)
    other_words(tmp_path / "other_words")
    return tree | {
        "steps": 3,
        "model": {"path": str(model)},
        "distill": {"loss": "sampled_reverse_kl"},
        "rollout": {"max_new_tokens": 8},
        "optim": {"lr": 0.01},
    }


def losses(place: Path, name: str) -> list[tuple[int, float, float]]:
    lines = read_metrics(place / "runs" / name / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_server_that_fails_stops_the_run_and_the_same_command_goes_on(
    warm: WarmPython, tmp_path: Path, taught: dict[str, Any]
) -> None:
    with served(warm.program, tmp_path / "fault", tmp_path / "teacher", tmp_path / "other_words") as server:
        other = {"kind": "server", "url": server.url("other_words")}
        before = everything_in(tmp_path) | {"run.yaml", "fault.log"}
        refused = distill(warm, tmp_path, taught | {"teacher": other}, "distill", "run.yaml")
        after = everything_in(tmp_path)
        section = {"kind": "server", "url": server.url("teacher"), "attempts": 1}
        of_refused = len(server.asked())
        tree = taught | {"teacher": section, "run": {"name": "asked"}}
        server.spoil(f"500 {of_refused + OF_START + OF_STEP + 3}")
        stopped = distill(warm, tmp_path, tree, "distill", "run.yaml")
        server.spoil("")
        went_on = distill(warm, tmp_path, tree, "distill", "run.yaml")
    in_memory = taught | {"teacher": {"path": "teacher"}, "run": {"name": "straight"}}
    straight = distill(warm, tmp_path, in_memory, "distill", "run.yaml")

    assert refused.code == 2, refused.err
    assert len(re.findall(r"other_words/v1 .*tokenizer", refused.err)) == 1, "one rank speaks for all"
    assert "Traceback" not in refused.err
    assert after == before
    assert stopped.code == 3, stopped.err
    assert stopped.err.count(f" {server.url('teacher')} answers 500") == 1
    assert "Traceback" not in stopped.err
    assert saved_before_the_error(stopped.out) == 1
    assert went_on.code == straight.code == 0, went_on.err + straight.err
    assert resumed_at(went_on.out) == 1
    found, expected = losses(tmp_path, "asked"), losses(tmp_path, "straight")
    assert [step for step, _, _ in found] == [1, 2, 3]
    for one, other_ in zip(found, expected, strict=True):
        assert one == pytest.approx(other_, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_a_killed_run_that_goes_on_is_identical(warm: WarmPython, tmp_path: Path, taught: dict[str, Any]) -> None:
    with served(warm.program, tmp_path / "fault", tmp_path / "teacher") as server:
        tree = taught | {"teacher": {"kind": "server", "url": server.url("teacher")}}
        done = distill(warm, tmp_path, tree, "prove", "run.yaml", "--steps", "4", "--kill-at", "3")

    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "identical"
