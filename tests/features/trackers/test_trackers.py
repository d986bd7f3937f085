"""Trackers in processes of their own: what they are sent, after kills and rewinds, and that they never stop a run."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import patience
from holdfast.config.sections.metrics import MetricsConfig
from holdfast.errors import ConfigError
from holdfast.features.trackers.client import Trackers, check_trackers
from tests.features.trackers.cases import RUN_ID, VERSIONS, WrittenRun, effective, logged, wait_for

MINE = """
import json, os, sys, time

class Mine:
    def __init__(self, run, tag="none"):
        self.file = open(run.folder / "mine.jsonl", "a")
        self.put("open", run.run_id, run.name, tag, run.configuration["optim"]["kind"], dict(run.versions))

    def put(self, *values):
        self.file.write(json.dumps(values) + chr(10))
        self.file.flush()

    def write(self, step, metrics):
        self.put("write", step, metrics)

    def completions(self, step, rows):
        self.put("completions", step, rows)

    def close(self, status):
        self.put("close", status)

class Hangs:
    def __init__(self, run):
        (run.folder / "here").write_text(str(os.getpid()))
        time.sleep(10000)

class Raises:
    def __init__(self, run):
        pass

    def write(self, step, metrics):
        raise RuntimeError("the server said no")

class Dies:
    def __init__(self, run):
        os._exit(7)

class HoldsTheLock:
    def __init__(self, run):
        import ctypes
        (run.folder / "here").write_text(str(os.getpid()))
        ctypes.PyDLL(None).pause()
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a folder that has a file of the user's."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def csv_values(directory: Path) -> list[tuple[int, str, float]]:
    with (directory / "trackers" / "csv" / "metrics.csv").open(newline="") as file:
        return [
            (int(row["step"]), name, float(value))
            for row in csv.DictReader(file)
            for name, value in row.items()
            if name != "step" and value
        ]


def without_events(values: dict[tuple[int, str], float]) -> dict[tuple[int, str], float]:
    return {key: value for key, value in values.items() if not key[1].startswith("event/")}


def test_csv_ends_with_the_effective_log_after_a_kill_and_a_rewind(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "r", ["csv"])
    run.start()
    for step in range(1, 8):
        run.step(step, loss=1 / step, **({"eval__held_out__nll": 2.0} if step == 4 else {}))
    wait_for((tmp_path / "r" / "trackers" / "csv" / "metrics.csv").exists)
    for process in run.processes():
        os.killpg(process.pid, signal.SIGKILL)
    run.end()

    run.start(to=5)
    for step in range(6, 11):
        run.step(step, loss=3 / step)
    run.end()
    run.catch_up("csv")

    values = csv_values(tmp_path / "r")
    assert without_events(effective(values)) == pytest.approx(logged(tmp_path / "r"))
    assert (5, "event/rewind", 5.0) in values
    about = json.loads((tmp_path / "r" / "trackers" / "csv" / "run.json").read_text())
    assert (about["run_id"], about["versions"], about["configuration"]["optim"]["lr"]) == (RUN_ID, VERSIONS, 0.001)


def test_a_torn_row_of_csv_is_cut(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "r", ["csv"])
    run.start()
    run.step(1, loss=1.0)
    run.end()
    run.catch_up("csv")
    with (tmp_path / "r" / "trackers" / "csv" / "metrics.csv").open("a") as file:
        file.write("2,0.")

    run.start(to=1)
    run.step(2, loss=0.25)
    run.end()
    run.catch_up("csv")

    assert without_events(effective(csv_values(tmp_path / "r"))) == {(1, "loss"): 1.0, (2, "loss"): 0.25}


def test_a_class_of_ones_own_gets_numbers_completions_and_the_end(mine: Path) -> None:
    run = WrittenRun(mine / "r", [{"kind": "path", "path": "mine.py:Mine", "kwargs": {"tag": "blue"}}])
    run.start()
    run.step(1, loss=0.5, grad_norm=float("inf"))
    run.sample(1, "2+2?", "4\n" * 2000, 1.0)
    run.sample(1, "half \ud83d", "5", None)
    said = run.end()
    if said:  # a slow machine
        run.catch_up("Mine")

    lines = [json.loads(line) for line in (mine / "r" / "trackers" / "Mine" / "mine.jsonl").read_text().splitlines()]
    assert lines[0] == ["open", RUN_ID, "tiny", "blue", "adamw", VERSIONS]
    written = {name: value for kind, step, numbers in lines[1:-2] for name, value in numbers.items()}
    assert written["loss"] == 0.5
    assert written["grad_norm"] != written["grad_norm"]  # NaN: JSON has no infinity
    kind, step, rows = lines[-2]
    assert (kind, step, [row["reward"] for row in rows]) == ("completions", 1, [1.0, None])
    assert len(rows[0]["completion"]) < 1010
    assert rows[1]["prompt"] == "half \\ud83d"
    assert lines[-1] == ["close", "finished"]


@pytest.mark.parametrize("name", ["Hangs", "HoldsTheLock"])
def test_a_tracker_that_hangs_is_said_once_and_delays_the_end_by_five_seconds_at_most(
    mine: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = replace(patience.current, tracker_silent_seconds=0.5, tracker_look_seconds=0.0)
    monkeypatch.setattr(patience, "current", shorter)
    run = WrittenRun(mine / "r", [f"mine.py:{name}"])
    run.start()
    here = mine / "r" / "trackers" / name / "here"
    wait_for(lambda: here.exists() and here.read_text())
    assert run.trackers is not None
    said = [run.trackers.news()]
    time.sleep(0.7)
    said += [run.trackers.news() for _ in range(3)]
    began = time.monotonic()

    last = run.end()

    assert time.monotonic() - began < 5.0
    assert [text for texts in said for text in texts if "has been silent for" in text and name in text] != []
    assert sum(len(texts) for texts in said) == 1
    assert len(last) == 1
    assert "A resume sends what it lacks" in last[0]
    assert not Path(f"/proc/{here.read_text()}").exists()


@pytest.mark.parametrize(
    ("name", "words"), [("Raises", "RuntimeError: the server said no"), ("Dies", "ended with exit code 7")]
)
def test_a_tracker_that_fails_is_said_once_with_the_reason(
    mine: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "current", replace(patience.current, tracker_look_seconds=0.0))
    run = WrittenRun(mine / "r", [f"mine.py:{name}", "csv"])
    run.start()
    run.step(1, loss=1.0)
    assert run.trackers is not None

    said = wait_for(run.trackers.news)
    again = run.trackers.news()
    last = run.end()

    assert len(said) == 1
    assert words in said[0]
    assert "the run goes on without it" in said[0]
    assert again == []
    assert not any(name in text for text in last)


def test_a_process_ends_soon_after_a_run_that_was_killed(mine: Path) -> None:
    run = WrittenRun(mine / "r", ["mine.py:Hangs"])
    run.start()
    here = mine / "r" / "trackers" / "Hangs" / "here"
    wait_for(lambda: here.exists() and here.read_text())
    (process,) = run.processes()
    assert process.stdin is not None

    process.stdin.close()  # what the kernel does for a run that is killed

    assert process.wait(20) == -signal.SIGALRM
    assert run.trackers is not None
    assert "ended with signal 14" in run.trackers.news()[0]
    assert run.end() == []


def test_only_what_is_allowed_is_sent(mine: Path) -> None:
    run = WrittenRun(mine / "r", ["csv"], metrics={"track": ["metrics"]})
    run.start()
    run.step(1, loss=1.0)
    run.sample(1, "prompt", "completion", 1.0)
    run.end()
    run.catch_up("csv")

    folder = mine / "r" / "trackers" / "csv"
    about = json.loads((folder / "run.json").read_text())
    assert (about["configuration"], about["versions"]) == ({}, {})
    assert (folder / "completions.csv").read_text() == "step,prompt,completion,reward\n"
    assert effective(csv_values(mine / "r")) == {(1, "loss"): 1.0}


def test_a_tracker_that_cannot_work_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    section = MetricsConfig.model_validate({"sinks": ["there_is_none.py:Mine"]})

    with pytest.raises(ConfigError, match=r"metrics.sinks: there is no file there_is_none.py"):
        check_trackers(section.sinks, tmp_path)


def test_a_run_without_trackers_starts_no_process(tmp_path: Path) -> None:
    trackers = Trackers([], tmp_path, tmp_path)

    assert trackers.news() == trackers.close("finished") == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_effective_log(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = WrittenRun(tmp_path / "r", ["tensorboard"])
    run.start()
    for step in range(1, 5):
        run.step(step, loss=1 / step)
    run.sample(4, "a|b", "c", 0.5)
    run.end("failed")
    run.catch_up("tensorboard")
    run.start(to=2)
    run.step(3, loss=7.0)
    run.end()
    run.catch_up("tensorboard")

    events = accumulator.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    values = [(event.step, name, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    assert without_events(effective(values)) == pytest.approx(logged(tmp_path / "r"))
    assert (2, "event/rewind", 2.0) in values
    assert "configuration" in events.Tags()["tensors"]
