"""Whole runs by command: under torchrun, on ranks of our own, and the export evaluated."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.place import layout
from holdfast.features.forensics import proving as prove
from holdfast.parallel import mesh
from holdfast.training import directory
from tests.cli.fixtures import write_rows, write_run
from tests.cli.screens import ended, numbers
from tests.cli.warm import WarmPython, run
from tests.messages import Said, lacks


def metrics(run_directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_under_torchrun_is_the_run_of_the_command_and_its_export_evaluates_to_the_same_loss(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(7)])
    tree |= {"evaluation": {"sets": {"held": {"path": "held.jsonl"}}}, "optim": {"kind": "sgd", "lr": 0.1}}
    write_run(tmp_path / "run.yaml", tree)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
    command = ["-m", "holdfast.cli.main", "sft", "run.yaml"]

    ours = warm.run(*command, "run.name=ours", cwd=tmp_path)
    theirs = run([*torchrun, warm.program, *command, "run.name=theirs"], cwd=tmp_path)
    evaluated = warm.run("-m", "holdfast.cli.main", "eval", "runs/ours/exports/final", "launch.ranks=1", cwd=tmp_path)

    assert (ours.code, theirs.code, evaluated.code) == (0, 0, 0), (ours.err, theirs.err, evaluated.err)
    closing = ours.out.splitlines()[-2]
    assert ended(closing) == ("done", 2, "runs/ours")
    assert closing.endswith(" runs/ours/exports/final.")
    found = [
        [line["loss"] for line in metrics(tmp_path / "runs" / name) if "loss" in line] for name in ("ours", "theirs")
    ]
    assert len(found[0]) == 2
    assert found[0] == found[1]
    final = metrics(tmp_path / "runs" / "ours")[-1]["eval/held/loss"]
    printed = dict(line.split(" ") for line in evaluated.out.splitlines() if line.startswith("eval/"))
    assert float(printed["eval/held/loss"]) == pytest.approx(final, rel=1e-5)


@pytest.mark.slow
def test_a_run_starts_where_an_evaluation_was_before_it(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    rows = [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(5)]
    write_rows(tmp_path / "held.jsonl", rows)
    tree |= {"evaluation": {"sets": {"held": {"path": "held.jsonl"}}, "completions": {"samples": 2}}}
    write_run(tmp_path / "run.yaml", tree)

    evaluated = warm.run("-m", "holdfast.cli.main", "eval", "run.yaml", "launch.ranks=1", cwd=tmp_path)
    before = {path.name for path in (tmp_path / "runs/run").iterdir()}
    trained = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", "launch.ranks=1", "steps=1", cwd=tmp_path)

    assert evaluated.code == 0, evaluated.err
    assert "eval/held/loss" in evaluated.out
    assert "completions" in before
    assert trained.code == 0, trained.err
    assert [line["step"] for line in metrics(tmp_path / "runs/run")][-1] == 1


def test_names_that_are_repeated_where_torch_must_not_be_imported_are_the_same() -> None:
    assert (prove._KILL_VARIABLE, prove._BREAK_VARIABLE) == (mesh.KILL_VARIABLE, mesh.BREAK_VARIABLE)
    assert directory.CHECKPOINTS == layout.FOLDER


def test_a_folder_that_is_no_export_is_refused_by_its_name(warm: WarmPython, tmp_path: Path, said: Said) -> None:
    (tmp_path / "folder").mkdir()

    done = warm.run("-m", "holdfast.cli.main", "eval", "folder", cwd=tmp_path)

    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("folder ")
    assert re.findall(r"`holdfast (.*?)`", done.err) == [
        "eval folder --data ROWS.jsonl",
        "eval RUN.yaml model.path=folder",
    ]
    said(done.err.strip())


def test_code_that_lies_in_an_export_is_run_only_on_demand(
    warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any]
) -> None:
    export, target = tmp_path / "export", tmp_path / "executed"
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(7)])
    tree |= {"evaluation": {"sets": {"held": {"path": str(tmp_path / "held.jsonl")}}}, "launch": {"ranks": 1}}
    tree |= {"model": {"path": "somewhere", "trust_remote_code": True}}
    export.mkdir()
    write_run(export / "holdfast.yaml", tree)
    mapped = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (export / "config.json").write_text(json.dumps(mapped))
    (export / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(target)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )

    done = warm.run("-m", "holdfast.cli.main", "eval", "export", cwd=tmp_path)
    executed = target.exists()
    warm.run("-m", "holdfast.cli.main", "eval", "export", "model.trust_remote_code=true", cwd=tmp_path)

    assert done.code == 2, done
    assert "model.trust_remote_code" in done.err
    said(done.err.strip())
    assert not executed
    assert target.exists(), "the code does nothing, so the test shows nothing"


@pytest.mark.slow
def test_sequences_beyond_the_positions_of_a_rotary_model_are_told_of(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree)
    command = ["-m", "holdfast.cli.main", "sft", "run.yaml", "dry_run=true", "data.tokens_per_micro_batch=128"]

    within, beyond = (warm.run(*command, f"data.max_length={length}", cwd=tmp_path) for length in (64, 65))

    assert (within.code, beyond.code) == (0, 0), within.err + beyond.err
    assert "positions" not in within.out
    (note,) = [line for line in beyond.out.splitlines() if line.startswith("note: data.max_length ")]
    assert numbers(note)[:2] == [65, 64]


@pytest.mark.parametrize(("source", "decay"), [("config", "0.25"), ("checkpoint", "0.0")])
@pytest.mark.cases(1)
def test_every_resume_says_where_the_optimizer_s_settings_come_from(
    warm: WarmPython, place: Path, said: Said, source: str, decay: str
) -> None:
    arguments = [
        "steps=5",
        "optim.weight_decay=0.25",
        "optim.betas=[0.8,0.95]",
        f"checkpoint.resume.hyperparameters={source}",
    ]

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", *arguments, cwd=place)

    assert done.code == 0, done.err
    told = [line for line in done.out.splitlines() if line.startswith("optimizer: ")]
    assert f"weight_decay={decay}" in told[0]
    betas = {"config": "betas=(0.8, 0.95)", "checkpoint": "betas=(0.9, 0.999)"}[source]
    assert betas in told[0]
    assert told[0].endswith(f"(checkpoint.resume.hyperparameters: {source})")
    betas_of_both, decays = sorted(told[1:])
    assert lacks(betas_of_both, "betas: (0.9, 0.999) (0.8, 0.95)") == []
    assert lacks(decays, "weight_decay: 0.0 0.25") == []
    said("\n".join([told[0], betas_of_both, decays]))
