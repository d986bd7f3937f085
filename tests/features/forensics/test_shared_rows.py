"""Proofs, resumes, replays and explanations of runs whose ranks share rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_run
from tests.cli.warm import Done, WarmPython

SHARED = ("parallel.context=2", "data.tokens_per_micro_batch=24")
"""A row of 32 tokens is longer than a rank has room for."""
ALONE = ("parallel.context=1", "data.tokens_per_micro_batch=64")


def command(warm: WarmPython, place: Path, *arguments: str) -> Done:
    return warm.run("-m", "holdfast.cli.main", *arguments, cwd=place)


def steps_of(place: Path, name: str) -> list[dict[str, Any]]:
    lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.slow
def test_a_killed_run_whose_ranks_share_rows_goes_on_identically(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree)

    done = command(warm, tmp_path, "prove", "run.yaml", *SHARED, "--steps", "4", "--kill-at", "3", "--seed", "1")

    assert done.code == 0, done.out + done.err
    assert "steps 1 to 4: loss, gradient norm, learning rate and sequences are identical" in done.out
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(SHARED, ALONE), (ALONE, SHARED)], ids=["2 to 1", "1 to 2"])
def test_a_run_goes_on_at_another_context_with_the_numbers_of_one_rank(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    tree["model"]["dtype"] = "float64"
    tree |= {"optim": {"lr": 0.01, "schedule": "constant"}, "checkpoint": {"every_steps": 2}}
    write_run(tmp_path / "run.yaml", tree)
    whole = command(warm, tmp_path, "sft", "run.yaml", "run.name=whole", "steps=4", "launch.ranks=1")
    assert whole.code == 0, whole.err

    assert command(warm, tmp_path, "sft", "run.yaml", *first, "run.name=split", "steps=2").code == 0
    resumed = command(warm, tmp_path, "sft", "run.yaml", *second, "run.name=split", "steps=4")

    assert resumed.code == 0, resumed.err
    contexts = ["2" if context == SHARED else "1" for context in (first, second)]
    assert f"the checkpoint was written with parallel.context={contexts[0]}, this run has {contexts[1]}" in resumed.out
    split, expected = steps_of(tmp_path, "split"), steps_of(tmp_path, "whole")
    assert [line["step"] for line in split] == [1, 2, 3, 4]
    for name in ("data/order_hash", "num_tokens"):
        assert [line[name] for line in split] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in split] == pytest.approx([line[name] for line in expected], rel=1e-10)


@pytest.mark.slow
def test_a_recorded_step_whose_rows_were_shared_is_replayed_and_explained_by_one_process(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    tree |= {
        "rollout": {"group_size": 2, "max_new_tokens": 12, "record": True, "show": 0},
        "reward": {"kind": "length", "target": 6},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"every_steps": 1, "keep": {"every": 1}, "rehearsal": False},
    }
    write_run(tmp_path / "run.yaml", tree)
    trained = command(warm, tmp_path, "grpo", "run.yaml", *SHARED)
    assert trained.code == 0, trained.err
    assert "every packed row is shared by 2 ranks" in trained.out

    replayed = command(warm, tmp_path, "replay", "runs/run", "--step", "2")
    explained = command(warm, tmp_path, "explain-mismatch", "runs/run", "--step", "2")

    assert replayed.code == 0, replayed.out + replayed.err
    assert "step 2 is reproduced" in replayed.out
    assert explained.code == 0, explained.out + explained.err
    assert "nothing to explain" in explained.out
