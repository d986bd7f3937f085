"""`holdfast eval`: what each evaluated model and step leaves, and nobody else's is overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.fixtures import of_step, write_rows, write_run
from tests.cli.warm import WarmPython
from tests.messages import Said, lacks

COMMAND = ("-m", "holdfast.cli.main")


@pytest.mark.slow
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
    folders = [Path(done.out.splitlines()[-1].split()[-1]) for done in evaluations]
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


@pytest.mark.slow
def test_any_model_is_evaluated_on_rows_without_a_file_of_a_run(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    rows = [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(5)]
    write_rows(tmp_path / "held.jsonl", rows)
    write_run(tmp_path / "run.yaml", tree | {"launch": {"ranks": 1, "device": "cpu"}})
    trained = warm.run(*COMMAND, "sft", "run.yaml", cwd=tmp_path)
    assert trained.code == 0, trained.err
    plain = Path(shutil.copytree(tmp_path / "runs/run/exports/final", tmp_path / "plain"))
    for name in ("holdfast_export.json", "holdfast.yaml"):
        (plain / name).unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    here = ["launch.ranks=1", "launch.device=cpu"]

    done = warm.run(*COMMAND, "eval", "plain", "--data", "held.jsonl", *here, cwd=tmp_path)
    of_export = warm.run(*COMMAND, "eval", "runs/run/exports/final", "--data", "held.jsonl", *here, cwd=tmp_path)
    both = warm.run(*COMMAND, "eval", "run.yaml", "--data", "held.jsonl", cwd=tmp_path)

    assert (done.code, of_export.code) == (0, 0), done.err + of_export.err
    losses = [
        float(line.split(" ")[1])
        for out in (done.out, of_export.out)
        for line in out.splitlines()
        if line.startswith("eval/rows/loss")
    ]
    assert losses == pytest.approx([loss_by_transformers(plain, rows)] * 2, rel=1e-5)
    assert {path: path.read_bytes() for path in before} == before
    assert (both.code, both.out) == (2, "")
    assert lacks(both.err, "run.yaml evaluation") == []
    said(both.err.strip())


def loss_by_transformers(directory: Path, rows: list[dict[str, str]]) -> float:
    """Return the mean negative log-probability of answers and their ends; prompts are a user's turns."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    losses = []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([tokenizer.apply_chat_template(turns, return_dict=False)])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        losses += [-float(logprobs[place - 1, tokens[0, place]]) for place in range(len(prompt), tokens.shape[1])]
    return float(np.mean(losses))
