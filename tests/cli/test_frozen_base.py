"""A run whose checkpoints hold adapters alone, on a command line: its base moves, changes or goes, and comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.manifest import parse
from holdfast.checkpoint.keep import find
from holdfast.cli.main import app
from holdfast.errors import ConfigError
from holdfast.models.files.origin import files_fingerprint
from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import WarmPython
from tests.tiny import tiny_directory
from tests.training.cases import run, tree


def tree_of(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "model": {"path": "base", "lora": {"rank": 2}},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"rehearsal": False},
        "launch": {"ranks": 2, "device": "cpu"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("change", ["absent", "others"])
def test_a_run_without_its_base_is_refused_by_code_2_and_goes_on_when_it_is_back(
    warm: WarmPython, tmp_path: Path, change: str
) -> None:
    def sft(steps: int) -> Any:
        write_run(tmp_path / "run.yaml", tree_of(steps))
        return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    base = tiny_directory(tmp_path / "base", "llama")
    assert sft(1).code == 0
    saved = files_fingerprint(base).rpartition("-")[2]
    base.rename(tmp_path / "kept")
    here = "absent"
    if change == "others":
        here = files_fingerprint(tiny_directory(tmp_path / "base", "llama", seed=5)).rpartition("-")[2]

    refused = sft(2)

    assert refused.code == 2
    assert all(word in refused.err for word in (saved, here, "model.path", "checkpoint.frozen: save"))
    assert refused.err.strip().count("\n") == 0
    if change == "others":
        base.rename(tmp_path / "other")
    (tmp_path / "kept").rename(base)
    resumed = sft(2)
    assert resumed.code == 0, resumed.err
    newest = find.one(str(tmp_path / "runs/run"))
    assert (newest.manifest.step, newest.manifest.contents[0]) == (2, "trained parameters")


def checkpoint_command(name: str, *words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", name, *map(str, words)])


@pytest.fixture
def saved(pools: Any, tmp_path: Path) -> Path:
    """Return a checkpoint of adapters alone, whose base was named beside the YAML and not beside this process."""
    tiny_directory(tmp_path / "base", "llama")
    model = {"path": "base", "config": None, "tokenizer": None, "lora": {"rank": 2}}
    pools(1).run(run, tree(str(tmp_path), steps=1, model=model), str(tmp_path))
    checkpoint = find.one(str(tmp_path / "r"))
    assert checkpoint.manifest.contents[0] == "trained parameters"
    return Path(checkpoint.path)


def test_an_export_reads_the_base_where_the_run_did_and_where_it_is_said_to_be(saved: Path, tmp_path: Path) -> None:
    first = checkpoint_command("export", saved, "-o", tmp_path / "first")
    (tmp_path / "base").rename(tmp_path / "moved")
    gone = checkpoint_command("export", saved, "-o", tmp_path / "gone")
    other = tiny_directory(tmp_path / "other", "llama", seed=5)
    refused = checkpoint_command("export", saved, "-o", tmp_path / "gone", "--base", other)
    again = checkpoint_command("export", saved, "-o", tmp_path / "again", "--base", tmp_path / "moved")
    mean = checkpoint_command("average", saved, "-o", tmp_path / "mean", "--base", tmp_path / "moved")

    assert [done.exit_code for done in (first, again, mean)] == [0, 0, 0], (first.exception, again.exception)
    assert isinstance(gone.exception, CheckpointMismatch)
    assert "--base" in str(gone.exception)
    assert "hub" not in str(gone.exception)
    assert isinstance(refused.exception, CheckpointMismatch)
    hashes = [files_fingerprint(tmp_path / name).rpartition("-")[2] for name in ("moved", "other")]
    assert all(word in str(refused.exception) for word in hashes)
    assert not (tmp_path / "gone").exists()
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "mean")]
    for key, value in weights[0].items():
        assert torch.equal(weights[1][key], value), key
        torch.testing.assert_close(weights[2][key], value)


@pytest.mark.parametrize("options", [["--adapter"], ["--format", "torch"]])
def test_what_reads_no_base_takes_none(saved: Path, tmp_path: Path, options: list[str]) -> None:
    done = checkpoint_command("export", saved, "-o", tmp_path / "out", "--base", tmp_path / "base", *options)

    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_does_not_say_where_its_base_was_is_exported_from_the_current_directory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved / "manifest.json"
    manifest = parse(file.read_bytes(), str(file))
    earlier = {kind: marks for kind, marks in manifest.fingerprints.items() if kind != "base"}
    assert "base" in manifest.fingerprints
    file.write_bytes(replace(manifest, fingerprints=earlier).to_json())

    elsewhere = checkpoint_command("export", saved, "-o", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    beside = checkpoint_command("export", saved, "-o", tmp_path / "beside")

    assert isinstance(elsewhere.exception, CheckpointMismatch)
    assert "hub" in str(elsewhere.exception)
    assert beside.exit_code == 0, beside.exception
