"""Numbers that are read one update late stand under their own step, and whoever acts on them finds them read."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.crash.runs import log_of, saved_steps, state_differences, values_of
from tests.training.late_cases import run_each, steps_when_read

STEPS = 9
NAN = float("nan")
HELD = {"held": {"synthetic": {"task": "sort", "rows": 16, "seed": 7}}}
TIMES = ("timing/", "step_time", "throughput/", "memory/", "ranks/")


def lines_of(place: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as they were written, without times and memory."""
    lines = [json.loads(line) for line in (place / "r" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def states_of(place: Path) -> dict[int, dict[str, Any]]:
    """Return the counters of each checkpoint."""
    files = sorted((place / "r" / "checkpoints").glob("step-*/trainer.json"))
    states = [json.loads(file.read_text())["state"] for file in files]
    return {state["step"]: state for state in states}


def averages_of(place: Path, step: int) -> dict[str, list[Any]]:
    """Return the averages in the checkpoint of a step."""
    stored = find.one(str(place / "r" / "checkpoints" / f"step-{step:08d}"))
    return {key: stored.read(key).tolist() for key in stored.manifest.tensors if key.startswith("ema.")}


def events_of(place: Path, kind: str) -> list[Any]:
    events = [json.loads(line) for line in (place / "r" / "events.jsonl").read_text().splitlines()]
    return [{**event, "time": 0} for event in events if event["event"] == kind]


def of_both(pools: Any, tmp_path: Path, *, ranks: int = 1, sections: Any = None, **options: Any) -> list[Any]:
    """Run with numbers read at once, in the folder `now`, and read late, in the folder `late`; return what came out."""
    several = [
        (values_of(tmp_path / name, **({"steps": STEPS} | (sections or {}))), {"late": name == "late", **options})
        for name in ("now", "late")
    ]
    now, late = zip(*pools(ranks).run(run_each, several), strict=True)
    return [list(now), list(late)]


def assert_same(tmp_path: Path) -> None:
    now, late = tmp_path / "now", tmp_path / "late"
    assert lines_of(late) == lines_of(now)
    assert states_of(late) == states_of(now)
    assert events_of(late, "health") == events_of(now, "health")
    assert state_differences(late, now) == []


def test_reads_come_one_update_late_but_before_a_save_an_evaluation_and_the_last_step(
    pools: Any, tmp_path: Path
) -> None:
    values = values_of(
        tmp_path,
        steps=STEPS,
        checkpoint={"every_steps": 4},
        evaluation={"sets": HELD, "every_steps": 6},
    )

    (reads,) = pools(1).run(steps_when_read, values, True)

    # Saved at 4, 8 and the end, evaluated at 6; the first step's numbers are read at once.
    assert reads == [(1, 1), (2, 3), (3, 4), (4, 4), (5, 6), (6, 6), (7, 8), (8, 8), (9, 9)]


def test_reads_come_at_once_where_an_observer_or_a_decision_needs_them(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text("def looks(event):\n    assert event.metrics['loss'] > 0\n")
    at_once = [(step, step) for step in range(1, 5)]
    sections: dict[str, dict[str, Any]] = {
        "observed": {"observers": ["watch.py:looks"]},
        "stopped": {"stop_when": {"metric": "loss", "mode": "min", "patience": 99}},
        "of a plateau": {"optim": {"schedule": {"kind": "plateau", "metric": "loss", "mode": "min", "patience": 2}}},
        "best": {"checkpoint": {"every_steps": 100, "export_best": {"metric": "loss", "mode": "min"}}},
    }

    for name, section in sections.items():
        values = values_of(tmp_path / name, steps=4, **({"checkpoint": {"every_steps": 100}} | section))
        (reads,) = pools(1).run(steps_when_read, values, True, str(tmp_path))
        assert reads == at_once, name


@pytest.mark.slow
def test_lines_checkpoints_and_alarms_are_those_of_numbers_read_at_once(pools: Any, tmp_path: Path) -> None:
    """Steps 3, 4 and 7 are skipped, 4 before a save; a batch of fifty times the weights after 12 steps is a spike."""
    sections = {"steps": 16, "optim": {"lr": 2e-3, "schedule": "constant", "ema": {"decay": 0.75}}}
    weights = {3: NAN, 4: NAN, 7: NAN, 13: 50.0}

    outcomes = of_both(pools, tmp_path, ranks=2, sections=sections, weights=weights)

    assert [outcome.step for both in outcomes for outcome in both] == [16] * 4
    assert_same(tmp_path)
    assert [state["skipped_steps"] for state in states_of(tmp_path / "late").values()] == [0, 2, 2, *[3] * 5]
    assert averages_of(tmp_path / "late", 4) == averages_of(tmp_path / "late", 2) != averages_of(tmp_path / "late", 6)
    assert events_of(tmp_path / "late", "health"), "the case must raise an alarm"
    spikes = [sorted((tmp_path / name / "r" / "spikes").iterdir()) for name in ("now", "late")]
    assert [file.name for file in spikes[0]] == [file.name for file in spikes[1]] != []
    for one, two in zip(*spikes, strict=True):
        assert one.read_text() == two.read_text()
    trained = [json.loads(line)["sample_id"] for file in spikes[1] for line in file.read_text().splitlines()]
    assert sorted(trained) == list(range(192, 200)), "the last 8 of 200 rows"


def test_the_last_step_before_the_end_of_the_data_is_read(pools: Any, tmp_path: Path) -> None:
    """A filter leaves half of the rows, so that the steps of an epoch are fewer than was planned."""
    (tmp_path / "rows.py").write_text(
        "import zlib\ndef is_taken(row):\n    return zlib.crc32(repr(row).encode()) % 2 == 0\n"
    )
    taken = {"filter": f"{tmp_path}/rows.py:is_taken"}
    sections = {"steps": None, "epochs": 1, "checkpoint": {"every_steps": 100}, "data": taken}

    now, late = of_both(pools, tmp_path, sections=sections, weights={8: NAN})

    assert [outcome.step for outcome in now + late] == [8, 8]
    assert states_of(tmp_path / "late")[8]["skipped_steps"] == 1
    assert_same(tmp_path)


def test_too_many_skipped_updates_end_the_run_at_the_same_step(pools: Any, tmp_path: Path) -> None:
    sections = {"optim": {"lr": 2e-3, "max_nonfinite_steps": 3}, "checkpoint": {"every_steps": 100}}

    now, late = of_both(pools, tmp_path, sections=sections, weights=dict.fromkeys(range(3, STEPS), NAN))

    assert now == late
    assert now[0][0] == "RunStopped"
    assert "not finite in 3 updates in a row, the last at step 5" in now[0][1]
    assert states_of(tmp_path / "late") == states_of(tmp_path / "now")
    assert states_of(tmp_path / "late")[5]["skipped_in_a_row"] == 3
    assert lines_of(tmp_path / "late") == lines_of(tmp_path / "now")


def test_what_is_saved_before_an_error_has_counted_the_update_before_it(pools: Any, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every_steps": 100}}

    now, late = of_both(pools, tmp_path, sections=sections, weights={4: NAN}, fails_at=5)

    assert now == late == [("ValueError", "the step fails")]
    assert states_of(tmp_path / "late") == states_of(tmp_path / "now")
    assert states_of(tmp_path / "late")[4]["skipped_steps"] == 1
    assert [line["step"] for line in lines_of(tmp_path / "late")] == [1, 2, 3, 4]


def test_a_step_whose_evaluation_fails_has_its_line_as_it_has_its_checkpoint(pools: Any, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every_steps": 100}, "evaluation": {"sets": HELD, "every_steps": 4}}

    now, late = of_both(pools, tmp_path, sections=sections, weights={4: NAN}, fails_to_evaluate=True)

    assert now == late == [("ValueError", "the evaluation fails")]
    for name in ("now", "late"):
        assert saved_steps(tmp_path / name) == [4]
        assert states_of(tmp_path / name)[4]["skipped_steps"] == 1
        assert [line["step"] for line in lines_of(tmp_path / name)] == [1, 2, 3, 4]
    assert lines_of(tmp_path / "late") == lines_of(tmp_path / "now")


def test_a_run_whose_evaluations_got_no_better_ends_at_its_fewest_steps(pools: Any, tmp_path: Path) -> None:
    """The loss falls, so that it never grows; the run would have ended at step 4."""
    sections = {
        "min_steps": 5,
        "checkpoint": {"every_steps": 100},
        "evaluation": {"sets": HELD, "every_steps": 2},
        "stop_when": {"metric": "eval/held/loss", "mode": "max", "patience": 1},
    }

    now, late = of_both(pools, tmp_path, sections=sections)

    assert now[0].stopped is not None
    assert [(outcome.step, outcome.stopped) for outcome in now + late] == [(5, now[0].stopped)] * 2
    assert_same(tmp_path)


def test_an_abandoned_step_leaves_the_numbers_of_the_step_before_it(pools: Any, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every_steps": 100}}

    now, late = of_both(pools, tmp_path, sections=sections, weights={4: NAN}, abandoned_at=5)

    assert [(outcome.step, outcome.stopped) for outcome in now + late] == [(4, "stopped by SIGTERM")] * 2
    assert states_of(tmp_path / "late")[4]["skipped_steps"] == 1
    assert_same(tmp_path)


def test_a_signal_finds_the_numbers_of_its_step_read(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "import os, signal\nSEEN = []\n"
        "def is_taken(row):\n"
        "    SEEN.append(row)\n"
        "    if len(SEEN) == 16 * 6:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return True\n"
    )
    values = values_of(tmp_path, steps=STEPS, checkpoint={"every_steps": 100}, data={"filter": "rows.py:is_taken"})

    ((outcome,),) = pools(1).run(run_each, [(values, {"late": True})], str(tmp_path))

    assert outcome.stopped == "stopped by SIGTERM"
    assert outcome.step < STEPS
    assert saved_steps(tmp_path) == [outcome.step]
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, outcome.step + 1))
    assert all("loss" in line for line in lines_of(tmp_path))


def drawn(seed: int) -> str:
    """Draw step and phase of a kill."""
    chance = random.Random(seed)
    phases = ["data", "forward_backward", "optimizer", "save: shards", "save: publish", "save: retention"]
    return f"0:{chance.randrange(2, STEPS + 1)}:{chance.choice(phases)}"


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    assert start(warm, place) == (0, "")
    return place


def start(warm: WarmPython, place: Path, kill: str | None = None) -> tuple[int, str]:
    """Run the module's run in a process of its own; return its exit code and what it said of an error."""
    values = values_of(place, steps=STEPS, launch={"ranks": 1, "device": "cpu"})
    write_run(place / "run.yaml", values)
    command = [str(warm.program), "-m", "tests.training.late_cases", "run.yaml"]
    variables = {} if kill is None else {"HOLDFAST_PROVE_KILL": kill}
    done = subprocess.run(
        command, cwd=place, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("seed", range(4), ids=drawn)
def test_a_late_reading_run_that_is_killed_goes_on_as_one_that_was_not(
    warm: WarmPython, straight: Path, tmp_path: Path, seed: int
) -> None:
    code, _ = start(warm, tmp_path, drawn(seed))
    steps, written = saved_steps(tmp_path), [line.get("step") for line in lines_of(tmp_path)]
    assert code != 0
    assert max(steps, default=0) <= max((step for step in written if step is not None), default=0)

    assert start(warm, tmp_path) == (0, "")

    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []
    assert states_of(tmp_path)[STEPS] == states_of(straight)[STEPS]
    assert [line["step"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.gpu
def test_a_gpu_gives_the_numbers_that_it_gives_when_they_are_read_at_once(tmp_path: Path) -> None:
    for name in ("now", "late"):
        place = tmp_path / name
        place.mkdir()
        launch, averaged = {"ranks": 1, "device": "cuda"}, {"lr": 2e-3, "schedule": "constant", "ema": {"decay": 0.75}}
        write_run(place / "run.yaml", values_of(place, steps=STEPS, determinism=True, launch=launch, optim=averaged))
        command = [sys.executable, "-m", "tests.training.late_cases", "run.yaml", name]
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command, cwd=place, env=variables, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr

    assert_same(tmp_path)
