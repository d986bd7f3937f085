"""Trackers beside whole runs: a resume goes on in the same files, a dry run has none, and none stops a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast import patience
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from tests.training.cases import run, tree

MINE = """
import json

class Mine:
    def __init__(self, run):
        self.file = open(run.folder / "rows", "a")
        self.put("opened")

    def put(self, *values):
        print(json.dumps(values), file=self.file, flush=True)

    write = completions = close = put
"""


def run_patiently(world: World, values: dict[str, Any]) -> Any:
    """Run, and let its trackers end as late as on a busy machine."""
    usual = patience.current
    patience.current = replace(usual, tracker_close_seconds=120.0)
    try:
        return run(world, values)
    finally:
        patience.current = usual


def test_a_resumed_run_goes_on_in_its_trackers(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    metrics = {"progress": "off", "sinks": [f"{tmp_path}/mine.py:Mine"]}

    for steps in (2, 4):
        pools(1).run(run_patiently, tree(str(tmp_path), steps=steps, metrics=metrics))

    rows = [json.loads(row) for row in (tmp_path / "r" / "trackers" / "Mine" / "rows").read_text().splitlines()]
    starts = [number for number, row in enumerate(rows) if row == ["opened"]]
    assert rows[starts[1] - 1] == rows[-1] == ["finished"]
    assert rows[starts[1] + 1] == [2, {"event/rewind": 2.0}]
    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "loss" in line]
    sent = [(step, numbers["loss"]) for step, numbers in (row for row in rows if len(row) == 2) if "loss" in numbers]
    assert sent == [(line["step"], line["loss"]) for line in lines]


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
