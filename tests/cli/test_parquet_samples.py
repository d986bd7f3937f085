"""Completions as parquet: what samples.jsonl would hold, through a kill and a resume."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from holdfast.metrics.sink import SampleFiles
from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import WarmPython

KILLS = """
import os, signal
from pathlib import Path

def kill_once(event):
    marker = Path(__file__).with_name("killed")
    if event.step == 4 and os.environ["RANK"] == "0" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
REWARDS = """
def even(completion):
    return float(len(completion) % 2 == 0)

def shy(completion, sample_id):
    return None if sample_id % 3 else 0.5
"""


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of parquet as samples.jsonl writes it."""
    parts = {name.removeprefix("rewards/"): value for name, value in row.items() if name.startswith("rewards/")}
    return {name: value for name, value in row.items() if not name.startswith("rewards/")} | {"rewards": parts}


@pytest.mark.slow
def test_parquet_holds_what_the_lines_hold_after_a_kill(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    (tmp_path / "kills.py").write_text(KILLS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "answer": str(n)} for n in range(12)])
    policy = tree | {
        "steps": 5,
        "reward": [{"path": "rewards.py:even"}, {"path": "rewards.py:shy"}],
        "rollout": {"group_size": 2, "max_new_tokens": 4, "show_every": 1},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"at_start": False, "at_end": False},
        "optim": {"lr": 0.01, "schedule": "constant"},
    }
    write_run(tmp_path / "run.yaml", policy)
    command = ("-m", "holdfast.cli.main", "grpo", "run.yaml")

    lines = warm.run(*command, "run.name=lines", cwd=tmp_path)
    parquet_and_csv = ("metrics.samples=parquet", "metrics.sinks=[csv]")
    files = (*command, "run.name=files", *parquet_and_csv, "observers=[kills.py:kill_once]")
    killed, resumed = (warm.run(*files, cwd=tmp_path) for _ in range(2))

    assert (lines.code, killed.code, resumed.code) == (0, 3, 0), lines.err + resumed.err
    expected = [json.loads(line) for line in (tmp_path / "runs/lines/samples.jsonl").read_text().splitlines()]
    with_tokens = [(line, tokens) for line in expected if (tokens := line.pop("tokens", None))]
    assert {line["step"] for line, _ in with_tokens} == {1, 2, 3, 4, 5}
    for line, tokens in with_tokens:
        words = "".join(text for text, _, _ in tokens)
        assert re.sub(r"<\w+>", "", words) == line["completion"], "special tokens left out"
        assert all(
            logprob <= 0 and advantage == pytest.approx(line["advantage"], abs=1e-4) for _, logprob, advantage in tokens
        )
    folder = tmp_path / "runs/files/samples"
    assert [file.name for file in sorted(folder.iterdir())] == [f"step-{n:08d}.parquet" for n in range(1, 6)]
    rows = [row for file in sorted(folder.iterdir()) for row in parquet.read_table(file).to_pylist()]
    assert [nested(row) for row in rows] == expected
    assert len(rows) == 5 * 4 * 2
    assert len({str(parquet.read_schema(file)) for file in folder.iterdir()}) == 1
    assert not (tmp_path / "runs/files/samples.jsonl").exists()
    with (tmp_path / "runs/files/trackers/csv/completions.csv").open(newline="") as file:
        tracked = {row["step"] for row in csv.DictReader(file)}
    assert "5" in tracked or "rows are lost" in resumed.out + resumed.err  # a slow machine


def test_files_of_steps_that_a_resume_went_back_behind_are_removed(tmp_path: Path) -> None:
    sample = {"sample_id": 1, "completion": "half \ud83d", "reward": None, "rewards": {}, "trained": True}
    before = SampleFiles(tmp_path, 0)
    for step in (1, 2, 3):
        before.write([sample | {"step": step}])
    (tmp_path / ".step-00000004.parquet").write_bytes(b"torn")
    (tmp_path / "notes.txt").write_text("mine")

    opened = SampleFiles(tmp_path, 1)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", "step-00000001.parquet"]
    opened.write([sample | {"step": 2, "reward": 1.0}])

    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "notes.txt", "step-00000001.parquet", "step-00000002.parquet",
    ]  # fmt: skip
    (row,) = parquet.read_table(tmp_path / "step-00000002.parquet").to_pylist()
    assert row == {"sample_id": 1, "completion": "half \\ud83d", "reward": 1.0, "trained": True, "step": 2}
