"""The command in the process of the tests, and a small run, made once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.in_process import cli_in_process
from tests.cli.warm import Done, WarmPython

Command = Callable[..., Done]
"""Runs `holdfast checkpoint ARGUMENTS`."""

HOLDFAST = Path(sys.executable).parent / "holdfast"

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def holdfast(tmp_path: Path) -> Callable[..., Done]:
    """Return a function that runs `holdfast ARGUMENTS` in an empty directory, in this process."""
    return lambda *arguments: cli_in_process(*arguments, cwd=tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """Return a run's tree that works on one rank or two, with its rows in the same directory."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    return {
        "steps": 2,
        "model": {"config": dict(TINY), "tokenizer": "builtin:characters"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "launch": {"ranks": 2, "device": "cpu"},
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(path: Path, tree: dict[str, Any]) -> Path:
    """Write a run's YAML."""
    path.write_text(yaml.safe_dump(tree))
    return path


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that one of the workers makes for all; the others wait for it."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / name).exists():
            make(Path(tempfile.mkdtemp(dir=shared)).rename(shared / f"{name}-unfinished"))
            (shared / f"{name}-unfinished").rename(shared / name)
    return shared / name


@pytest.fixture(scope="session")
def trained(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of four steps on two ranks, a checkpoint of each; nobody changes it."""
    return made_once(tmp_path_factory, "trained", lambda place: _train(warm, place))


def _train(warm: WarmPython, place: Path) -> None:
    write_rows(place / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    tree = {
        "steps": 4,
        "model": {"config": TINY | {"tie_word_embeddings": True}, "tokenizer": "builtin:characters"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"every_steps": 1, "keep": {"last": 9}, "rehearsal": False},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(place / "run.yaml", tree)
    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=place)
    assert done.code == 0, done.err


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """Return a copy, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def checkpoint(place: Path) -> Command:
    """Return a function that runs `holdfast checkpoint ARGUMENTS` beside the run, in this process."""
    return lambda *arguments: cli_in_process("checkpoint", *arguments, cwd=place)


def of_step(step: int) -> str:
    return f"runs/run/checkpoints/step-{step:08d}"
