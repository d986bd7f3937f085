"""`holdfast eval`: what each evaluated model and step leaves, and nobody else's is overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import of_step, write_rows, write_run
from tests.cli.warm import WarmPython

COMMAND = ("-m", "holdfast.cli.main")


def test_every_model_and_step_has_a_directory_with_its_numbers(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(5)])
    tree |= {
        "launch": {"ranks": 1, "device": "cpu"},
        "evaluation": {"sets": {"held": {"path": "held.jsonl"}}, "completions": {"samples": 2}},
        "checkpoint": {"every_steps": 1},
        "optim": {"lr": 0.1, "schedule": "constant"},
    }
    write_run(tmp_path / "run.yaml", tree)
    trained = warm.run(*COMMAND, "sft", "run.yaml", cwd=tmp_path)
    earlier = warm.run(*COMMAND, "checkpoint", "export", of_step(1), "-o", "model-one", cwd=tmp_path)
    assert (trained.code, earlier.code) == (0, 0), trained.err + earlier.err
    before = {path.name for path in (tmp_path / "runs/run/completions").iterdir()}

    evaluations = [
        warm.run(*COMMAND, "eval", "run.yaml", f"model.path={path}", "model.config=null", cwd=tmp_path)
        for path in ("runs/run/exports/final", "model-one")
    ]

    assert [done.code for done in evaluations] == [0, 0], evaluations[0].err
    folders = [Path(done.out.splitlines()[-1].removeprefix("numbers and completions are in ")) for done in evaluations]
    new = {path.name for path in (tmp_path / "runs/run/completions").iterdir()} - before
    assert {folder.name for folder in folders} == new
    for folder, done, step in zip(folders, evaluations, (2, 1), strict=True):
        assert folder.name.startswith(f"run-step-{step:08d}-")
        kept = json.loads((tmp_path / folder / "metrics.json").read_text())
        printed = dict(line.split(" ") for line in done.out.splitlines() if line.startswith("eval/"))
        assert kept["metrics"].keys() == printed.keys()
        for name, value in kept["metrics"].items():
            assert value == pytest.approx(float(printed[name]), rel=1e-5, abs=1e-9)
        assert kept["exports"]["model.path"]["step"] == step
        assert len((tmp_path / folder / "eval.held.jsonl").read_text().splitlines()) == 2
    losses = [
        json.loads((tmp_path / each / "metrics.json").read_text())["metrics"]["eval/held/loss"] for each in folders
    ]
    last = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[-1])
    assert losses[0] == pytest.approx(last["eval/held/loss"], rel=1e-6)
    assert losses[0] != losses[1]
