"""What metrics.jsonl holds when not every step has a line."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from tests.training.cases import run, tree

WATCH = """
def stops_at_three(event):
    return "stop" if event.step == 3 else None

def fails_at_three(event):
    if event.step == 3:
        raise ValueError("a bug")
"""
FILLS = """
import resource
import time
from pathlib import Path

class Mine:
    def __init__(self, run):
        self.folder = run.folder
        (self.folder / "here").touch()

    def write(self, step, metrics):
        pass

    def close(self, status):
        (self.folder / "closed").write_text(status)

def fills_at_three(event):
    if event.step == 3:
        while not Path("FOLDER/here").exists():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        raise ValueError("a bug")
"""
SETS = {"held": {"synthetic": {"task": "sort", "rows": 8, "seed": 9}}}


@pytest.mark.parametrize(
    ("every", "evaluation", "steps"),
    [
        (5, {}, [5, 7]),
        (4, {"sets": SETS, "every_steps": 3, "at_end": False}, [3, 4, 6, 7]),
        (5, {"sets": SETS}, [5, 7, 7]),
    ],
)
def test_lines_are_written_when_due_with_evaluations_and_at_the_end(
    pools: Any, tmp_path: Path, every: int, evaluation: dict[str, Any], steps: list[int]
) -> None:
    metrics = {"progress": "off", "log_every": every}

    pools(1).run(run, tree(str(tmp_path), steps=7, metrics=metrics, evaluation=evaluation))

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [line["step"] for line in lines] == steps
    assert ["loss" in line for line in lines] == [True, True, *[step != steps[1] for step in steps[2:]]]


@pytest.mark.parametrize("observer", ["stops_at_three", "fails_at_three"])
@pytest.mark.cases(1)
def test_a_run_that_ends_early_leaves_a_line_of_its_last_step(pools: Any, tmp_path: Path, observer: str) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    metrics = {"progress": "off", "log_every": 10}
    values = tree(str(tmp_path), metrics=metrics, observers=[f"watch.py:{observer}"])

    pools(2).outcomes(run, values, str(tmp_path), timeout_seconds=120)

    told = [(line["step"], "loss" in line) for line in read_metrics(tmp_path / "r" / "metrics.jsonl")]
    assert told == [(3, True)]


def test_events_of_steps_without_a_line_are_counted_in_the_next_line(pools: Any, tmp_path: Path) -> None:
    """Of 40 rows those of odd length are filtered; a pass counts each of them once, whatever has a line."""
    (tmp_path / "even.py").write_text("def keep(row):\n    return len(row['completion']) % 2 == 0\n")
    data = {"synthetic": {"task": "sort", "rows": 40}, "batch_size": 4, "filter": "even.py:keep"}
    counted = []
    for every in (1, 3):
        metrics = {"progress": "off", "log_every": every}
        values = tree(str(tmp_path / str(every)), epochs=1, data=data, metrics=metrics)
        values.pop("steps")

        pools(1).run(run, values, str(tmp_path))

        counted.append(read_metrics(tmp_path / str(every) / "r" / "metrics.jsonl"))

    every_step, some = counted
    assert len(some) < len(every_step)
    assert sum(line.get("data/filtered", 0) for line in some) == 40 - sum(line["data/rows"] for line in every_step)
    assert [line["data/rows"] for line in some if line["step"] % 3 == 0] == [4.0] * (len(every_step) // 3)


def run_until_full(world: World, values: dict[str, Any], base: str) -> None:
    """Run, and let this process write files again behind it."""
    try:
        run(world, values, base)
    finally:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_disk_that_takes_no_line_of_the_last_step_keeps_no_tracker_from_its_end(pools: Any, tmp_path: Path) -> None:
    folder = tmp_path / "r" / "trackers" / "Mine"
    (tmp_path / "full.py").write_text(FILLS.replace("FOLDER", str(folder)))
    metrics = {"progress": "off", "log_every": 10, "sinks": ["full.py:Mine"]}
    values = tree(str(tmp_path), metrics=metrics, observers=["full.py:fills_at_three"])

    pools(1).outcomes(run_until_full, values, str(tmp_path), timeout_seconds=120)

    assert read_metrics(tmp_path / "r" / "metrics.jsonl") == []
    assert (folder / "closed").read_text() == "failed"
