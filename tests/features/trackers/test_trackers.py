"""Trackers in processes of their own: what they are sent, what is lost and counted, and that none stops a run."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast import patience
from holdfast.config.sections.metrics import MetricsConfig
from holdfast.errors import ConfigError
from holdfast.features.trackers.client import MOST_WAITING_BYTES, Trackers, check_trackers
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

def here(run):
    (run.folder / "here").write_text(str(os.getpid()))

class Takes:
    def __init__(self, run):
        here(run)
        self.run = run

    def write(self, step, metrics):
        pass

    def close(self, status):
        (self.run.folder / "closed").write_text(status)

class HangsAtTheStart:
    def __init__(self, run):
        here(run)
        time.sleep(10000)

class HangsInARow(Takes):
    def write(self, step, metrics):
        if step > 2:
            time.sleep(10000)

class HangsAtTheEnd(Takes):
    def close(self, status):
        time.sleep(10000)

class HangsAtExit(Takes):
    def close(self, status):
        super().close(status)
        import atexit
        atexit.register(time.sleep, 10000)

class HoldsTheLock(Takes):
    def write(self, step, metrics):
        import ctypes
        ctypes.PyDLL(None).pause()

class Raises(Takes):
    def write(self, step, metrics):
        raise RuntimeError("the server https://me:planted-1@host.example said no to " + os.environ["MY_API_KEY"])

class RaisesInItsThread(Takes):
    def write(self, step, metrics):
        import threading
        error = RuntimeError("no to " + os.environ["MY_API_KEY"])
        def fail():
            raise error
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        sys.exit("said no to " + os.environ["MY_API_KEY"] + ", which is false")

class LeavesAProcess(Takes):
    def __init__(self, run):
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (run.folder / "child").write_text(str(child.pid))
        super().__init__(run)

class TellsItsEnvironment(Takes):
    def __init__(self, run):
        (run.folder / "silent").write_text(os.environ.get("WANDB_SILENT", "no"))
        super().__init__(run)

class IsSlow(Takes):
    def write(self, step, metrics):
        time.sleep(0.1)

class Dies(Takes):
    def write(self, step, metrics):
        if step > 2:
            os._exit(7)

class Segfaults(Takes):
    def write(self, step, metrics):
        import ctypes
        ctypes.string_at(0)
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
    assert (0, "event/rewind", 0.0) in values
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
    run.sample(1, ("2+2?", "4\n" * 2000, 1.0), ("half \ud83d", "5", None))
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


def started(folder: Path, name: str, *more: str) -> WrittenRun:
    """Return a run whose tracker stands."""
    run = WrittenRun(folder / "r", [f"mine.py:{name}", *more])
    run.start()
    wait_for(lambda: pid(run, name))
    return run


def pid(run: WrittenRun, name: str) -> str:
    path = run.directory / "trackers" / name / "here"
    return path.read_text() if path.exists() else ""


def recorded(run: WrittenRun) -> int:
    assert run.trackers is not None
    (tracker,) = run.trackers._trackers
    tracker._hear()
    return tracker._recorded


HANGS = {"HangsAtTheStart": 0, "HangsInARow": 2, "HoldsTheLock": 0, "HangsAtTheEnd": 5}
"""Of five rows, how many are recorded before."""


@pytest.mark.parametrize("name", HANGS)
def test_of_a_tracker_that_hangs_rows_are_counted_and_the_end_is_five_seconds_late_at_most(
    mine: Path, name: str
) -> None:
    run = started(mine, name)
    process = pid(run, name)
    for step in range(1, 6):
        run.step(step, loss=1.0)
    wait_for(lambda: recorded(run) == HANGS[name])
    began = time.monotonic()

    (said,) = run.end()

    assert time.monotonic() - began < 5.0
    assert f"tracker {name}: was ended 4 s after the run" in said
    assert f"{5 - HANGS[name]} of 5 rows are lost" in said
    assert not Path(f"/proc/{process}").exists()


def test_a_tracker_that_hangs_at_exit_has_lost_nothing(mine: Path) -> None:
    run = started(mine, "HangsAtExit")
    run.step(1, loss=1.0)
    wait_for(lambda: recorded(run) == 1)

    said = run.end()

    if not said:  # on a slow machine it may not have come to its end
        assert (run.directory / "trackers" / "HangsAtExit" / "closed").read_text() == "finished"
    assert not Path(f"/proc/{pid(run, 'HangsAtExit')}").exists()


def test_silence_is_said_once(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = replace(patience.current, tracker_silent_seconds=0.5, tracker_look_seconds=0.0, tracker_close_seconds=0.5)
    monkeypatch.setattr(patience, "current", shorter)
    run = started(mine, "HangsAtTheStart")
    assert run.trackers is not None
    time.sleep(0.7)
    assert run.trackers.news() == []  # nothing was sent

    run.step(1, loss=1.0)
    said = wait_for(run.trackers.news)
    again = [run.trackers.news() for _ in range(3)]
    run.end()

    assert len(said) == 1
    assert "has been silent for" in said[0]
    assert "without it" not in said[0]
    assert again == [[], [], []]


def test_a_tracker_far_behind_costs_no_step_and_little_memory(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "current", replace(patience.current, tracker_close_seconds=0.5))
    run = started(mine, "HangsInARow")
    assert run.trackers is not None
    row = {f"{number:0100}": 1.0 for number in range(10_000)}  # 1.1 MB
    run.trackers.write(1, {"loss": 1.0})
    wait_for(lambda: recorded(run) == 1)
    before, longest = psutil.Process().memory_info().rss, 0.0

    for step in range(3, 203):
        began = time.thread_time()
        run.trackers.write(step, row)
        longest = max(longest, time.thread_time() - began)

    assert psutil.Process().memory_info().rss - before < 2 * MOST_WAITING_BYTES
    assert longest < 0.5
    assert "200 of 201 rows are lost" in run.end()[0]


@pytest.mark.parametrize(
    ("name", "words", "lost"),
    [
        ("Raises", "RuntimeError: the server https://host.example said no to (MY_API_KEY)", 4),
        ("RaisesInItsThread", "SystemExit: said no to (MY_API_KEY), which is false", 4),
        ("Dies", "ended with exit code 7", 2),
        ("Segfaults", "ended with signal 11", 4),
    ],
)
def test_a_tracker_that_fails_is_said_once_with_the_reason_and_its_rows_at_the_end(
    mine: Path, name: str, words: str, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "current", replace(patience.current, tracker_look_seconds=0.0))
    monkeypatch.setenv("MY_API_KEY", "planted-2")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    run = started(mine, name)
    for step in (1, 2, 3):
        run.step(step, loss=1.0)
    assert run.trackers is not None

    said = wait_for(run.trackers.news)
    again = run.trackers.news()
    run.step(4, loss=1.0)
    last = run.end()

    assert len(said) == 1
    assert words in said[0]
    assert "the run goes on without it" in said[0]
    assert again == []
    assert len(last) == 1
    assert f"{lost} of 4 rows are lost" in last[0]
    assert "planted" not in (run.directory / "logs" / f"tracker-{name}.log").read_text() + said[0] + last[0]


@pytest.mark.parametrize("name", ["Takes", "HangsAtTheStart"])
def test_a_process_ends_soon_after_a_run_that_was_killed(mine: Path, name: str) -> None:
    program = f"""
import sys, time
from pathlib import Path
from tests.features.trackers.cases import WrittenRun
run = WrittenRun(Path({str(mine / "r")!r}), ["mine.py:{name}"])
run.start()
for step in range(1000):
    run.step(step, loss=1.0)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        here = mine / "r" / "trackers" / name / "here"
        number = wait_for(lambda: here.exists() and here.read_text())
        process.kill()

    wait_for(lambda: not Path(f"/proc/{number}").exists())
    if name == "Takes":
        assert (mine / "r" / "trackers" / "Takes" / "closed").read_text() == "killed"


def test_the_command_of_the_warning_has_the_environment_that_the_run_gave_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder of mine"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    monkeypatch.setattr(patience, "current", replace(patience.current, tracker_close_seconds=0.1))
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    run = started(folder, "TellsItsEnvironment")
    (run.directory / "trackers" / "TellsItsEnvironment" / "silent").unlink()
    for process in run.processes():
        os.killpg(process.pid, signal.SIGKILL)
    run.step(1, loss=1.0)
    (said,) = run.end()
    command = said.partition("To send all: ")[2]

    subprocess.run(["bash", "-c", command], check=True, timeout=60, cwd=tmp_path)

    assert (written(run, "closed"), written(run, "silent")) == ("finished", "true")


def written(run: WrittenRun, name: str) -> str:
    """Return what the run's tracker wrote into a file."""
    return next((run.directory / "trackers").glob(f"*/{name}")).read_text()


@pytest.mark.parametrize(("kind", "sets"), [("csv", {}), ("wandb", {"WANDB_MODE": "offline"})])
def test_by_hand_a_library_sees_what_it_sees_in_a_run(kind: str, sets: dict[str, str], tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "r", [kind])
    program = (
        "import json, os, sys; from pathlib import Path; from holdfast.features.trackers.process import "
        "_take_environment as take; take(Path(sys.argv[1]), sys.argv[2]); print(json.dumps(dict(os.environ)))"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", program, str(run.directory), kind]

    done = subprocess.run(command, env=environ | {"OPENAI_API_KEY": "x"}, capture_output=True, text=True, check=True)

    seen = json.loads(done.stdout)
    assert "OPENAI_API_KEY" not in seen
    assert seen["DO_NOT_TRACK"] == "1"
    assert {name: seen.get(name) for name in sets} == sets


def test_by_hand_a_tracker_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "r", ["csv"])
    command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", str(run.directory), "wandb"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    assert "has no tracker wandb" in done.stderr


def test_what_a_launcher_asks_to_end_records_what_it_was_sent(mine: Path) -> None:
    run = started(mine, "IsSlow")
    for step in range(1, 6):
        run.step(step, loss=1.0)
    (process,) = run.processes()
    process.terminate()

    said = run.end()

    assert said == [] or "was ended" in said[0]  # on a slow machine
    assert recorded_before_the_end(said) > 1


def recorded_before_the_end(said: list[str]) -> int:
    """Return how many of five rows were recorded."""
    return 5 if not said else 5 - int(said[0].partition(" of 5 rows")[0].rpartition(" ")[2])


def test_a_row_that_a_kill_has_torn_is_left_out(mine: Path) -> None:
    run = WrittenRun(mine / "r", ["mine.py:Takes"])
    command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", "--of-run"]
    rows = b'{"step": 1, "metrics": {"loss": 1.0}}\n{"step": 2, "met'

    done = subprocess.run(
        [*command, str(run.directory), "Takes", str(mine)], input=rows, capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, written(run, "closed")) == (0, b".!", "killed")


def test_what_a_tracker_has_started_ends_with_it(mine: Path) -> None:
    run = started(mine, "LeavesAProcess")
    child = psutil.Process(int(written(run, "child")))

    run.end()

    wait_for(lambda: not child.is_running())


def test_only_what_is_allowed_is_sent(mine: Path) -> None:
    run = WrittenRun(mine / "r", ["csv"], metrics={"track": ["metrics"]})
    run.start()
    run.step(1, loss=1.0)
    run.sample(1, ("prompt", "completion", 1.0))
    run.end()
    run.catch_up("csv")

    folder = mine / "r" / "trackers" / "csv"
    about = json.loads((folder / "run.json").read_text())
    assert (about["configuration"], about["versions"]) == ({}, {})
    assert (folder / "completions.csv").read_text() == "step,prompt,completion,reward\n"
    assert without_events(effective(csv_values(mine / "r"))) == {(1, "loss"): 1.0}


def test_a_tracker_that_cannot_work_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    section = MetricsConfig.model_validate({"sinks": ["there_is_none.py:Mine"]})

    with pytest.raises(ConfigError, match=r"metrics.sinks: there is no file there_is_none.py"):
        check_trackers(section.sinks, tmp_path)


def test_a_run_without_trackers_starts_no_process(tmp_path: Path) -> None:
    trackers = Trackers(MetricsConfig(), tmp_path, tmp_path)

    assert trackers.news() == trackers.close("finished") == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_effective_log(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = WrittenRun(tmp_path / "r", ["tensorboard"])
    run.start()
    for step in range(1, 5):
        run.step(step, loss=1 / step)
    run.sample(4, ("a|b", "c", 0.5))
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
    assert (0, "event/rewind", 0.0) in values
    assert "configuration" in events.Tags()["tensors"]
