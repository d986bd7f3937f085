"""`holdfast config show --short` prints what a run needs beside the defaults, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from holdfast.config.verbs.roots import load_run
from tests.cli.in_process import cli_in_process

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_what_is_printed_is_the_same_configuration(file: Path, tmp_path: Path) -> None:
    done = cli_in_process("config", "show", str(file), "--short", cwd=EXAMPLES.parent)

    assert done.code == 0, done.err
    short = file.with_name(f".{file.stem}.short.yaml")  # relative paths are looked up beside the file
    short.write_text(done.out, encoding="utf-8")
    try:
        assert load_run(short, []).config == load_run(file, []).config
    finally:
        short.unlink()


def test_only_what_differs_is_printed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "steps: 3\noptim: {lr: 1e-3, weight_decay: 0.0}\nmodel: {path: here}\ndata: {path: a.jsonl, batch_size: 8}\n"
    )
    done = cli_in_process("config", "show", "run.yaml", "seed=7", "--short", cwd=tmp_path)

    assert done.code == 0, done.err
    assert yaml.safe_load(done.out) == {
        "steps": 3,
        "seed": 7,
        "optim": {"kind": "adamw", "lr": 1e-3},
        "model": {"path": "here"},
        "data": {"path": "a.jsonl", "batch_size": 8},
    }
