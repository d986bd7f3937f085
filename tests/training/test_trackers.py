"""Trackers beside whole runs: a resume goes on in the same files, a dry run has none, and none stops a run."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.training.cases import run, tree


def test_a_resumed_run_goes_on_in_its_trackers(pools: Any, tmp_path: Path) -> None:
    metrics = {"progress": "off", "sinks": ["csv"]}
    pools(1).run(run, tree(str(tmp_path), steps=2, metrics=metrics))

    pools(1).run(run, tree(str(tmp_path), steps=4, metrics=metrics))

    command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", str(tmp_path / "r"), "csv"]
    subprocess.run(command, check=True, timeout=120)  # a slow machine may not have sent everything in time
    with (tmp_path / "r" / "trackers" / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]}
    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "loss" in line]
    assert last == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert [(row["step"], row["event/rewind"]) for row in rows if row.get("event/rewind")] == [("2", "2.0")]


def test_a_tracker_that_dies_leaves_the_run_alone(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, run):\n        raise SystemExit(3)\n")
    sinks = [f"{tmp_path}/mine.py:Mine"]

    outcomes = pools(1).run(run, tree(str(tmp_path), steps=2, metrics={"progress": "off", "sinks": sinks}))

    assert (outcomes[0].step, outcomes[0].stopped) == (2, None)


def test_a_dry_run_starts_no_tracker(pools: Any, tmp_path: Path) -> None:
    text = "class Mine:\n    def __init__(self, run):\n        open(run.folder.parents[3] / 'started', 'w')\n"
    (tmp_path / "mine.py").write_text(text)
    metrics = {"progress": "off", "sinks": [f"{tmp_path}/mine.py:Mine"]}

    pools(1).run(run, tree(str(tmp_path), dry_run=True, metrics=metrics))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py"]
