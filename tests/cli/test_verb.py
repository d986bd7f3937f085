"""The verb of the command line is that of the ranks, of a resume, of an export and of looks at the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.screens import resumed_at
from tests.cli.warm import WarmPython

LOSS = """
class Margin:
    def losses(self, pairs):
        return (1 - pairs.chosen.mean_logps + pairs.rejected.mean_logps).clamp(min=0)

    def rewards(self, answers):
        return answers.mean_logps


def loss():
    return Margin()


def with_margin(margin):
    return Margin()
"""
TREE = {
    "steps": 1,
    "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
    "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32},
    "evaluation": {"sets": {"held": {"path": "rows.jsonl"}}},
    "launch": {"device": "cpu", "ranks": 1},
}


@pytest.mark.slow
def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "holdfast", "config", "schema", "grpo"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refused = subprocess.run([*command[:-1], "nothing"], capture_output=True, text=True, check=False)

    assert (done.returncode, refused.returncode) == (0, 2)
    assert json.loads(done.stdout)["title"] == "GRPOConfig"


@pytest.mark.slow
def test_preferences_with_a_loss_file_that_is_named_after_another_verb(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "my_bradley_terry.py").write_text(LOSS)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}=", "chosen": "a", "rejected": "b"} for n in range(8)])
    write_run(tmp_path / "run.yaml", {**TREE, "preference": {"loss": "my_bradley_terry.py:loss"}})
    commands = (
        ("dpo", "run.yaml"),
        ("dpo", "run.yaml", "steps=2"),
        ("eval", "runs/run/exports/final"),
        ("checkpoint", "export", "runs/run", "-o", "again"),
    )

    done = [warm.run("-m", "holdfast.cli.main", *command, cwd=tmp_path) for command in commands]
    shown = warm.run("-m", "holdfast.cli.main", "config", "show", "run.yaml", cwd=tmp_path)

    assert [each.code for each in done] == [0, 0, 0, 0], [each.err for each in done]
    assert resumed_at(done[1].out) == 1
    assert yaml.safe_load(shown.out)["preference"]["loss"][0]["kind"] == "path"
    assert "- dpo" in (tmp_path / "again/README.md").read_text().splitlines()


def test_an_export_whose_loss_has_arguments_is_evaluated_with_the_file_of_its_run(
    warm: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(LOSS)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}=", "chosen": "a", "rejected": "b"} for n in range(8)])
    loss = {"kind": "path", "path": "own.py:with_margin", "kwargs": {"margin": 1.0}}
    write_run(tmp_path / "run.yaml", {**TREE, "preference": {"loss": loss}})
    export = "runs/run/exports/final"
    commands = (
        ("dpo", "run.yaml"),
        ("eval", export),
        ("eval", "run.yaml", f"model.path={export}", "model.config=null"),
    )

    done = [warm.run("-m", "holdfast.cli.main", *command, cwd=tmp_path) for command in commands]

    assert [each.code for each in done] == [0, 2, 0], [each.err for each in done]
    assert "preference.loss.0.kwargs" in done[1].err
