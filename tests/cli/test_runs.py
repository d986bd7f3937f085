"""`holdfast runs ls` over directories that real runs left: done, stopped, failed, killed, going on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from holdfast.cli.commands.runs import listed, runs_table
from holdfast.metrics.sink import BY_OBSERVER
from holdfast.patience import Patience
from tests.cli.commands import LiveRun
from tests.cli.fixtures import write_rows, write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import numbers
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks

COMMAND = ("-m", "holdfast.cli.main")


@pytest.fixture
def ended(warm: WarmPython, tree: dict[str, Any], tmp_path: Path) -> Path:
    """Return a run of two steps with a rated export and a checkpoint of each step."""
    started(warm, tmp_path, tree)
    return tmp_path / "runs" / "run"


def started(warm: WarmPython, place: Path, tree: dict[str, Any], *words: str) -> Done:
    section = {
        "launch": {"ranks": 1, "device": "cpu"},
        "evaluation": {"sets": {"held": {"path": "rows.jsonl"}}, "every_steps": 1},
        "checkpoint": {"every_steps": 1, "export_best": {"metric": "eval/held/loss", "mode": "min"}},
    }
    write_run(place / "run.yaml", {**section, **tree, "launch": section["launch"]})
    return warm.run(*COMMAND, "sft", "run.yaml", *words, cwd=place)


def looked(place: Path, *words: str) -> Done:
    return cli_in_process("runs", "ls", *words, cwd=place)


def only(place: Path) -> dict[str, Any]:
    """Return the one run that is there."""
    (run,) = json.loads(looked(place, "--json").out)["runs"]
    return dict(run)


def files_below(place: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything below a directory."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in place.rglob("*")}


def test_a_run_that_is_done_is_listed_with_what_its_files_say_and_nothing_is_written(
    ended: Path, tmp_path: Path
) -> None:
    about = json.loads((ended / "exports/best/holdfast_export.json").read_text())
    before = files_below(tmp_path)

    done = looked(tmp_path)
    run = only(tmp_path)

    assert files_below(tmp_path) == before
    assert done.code == 0, done.err
    value = f"{about['rating']['value']:.5g}"
    row = done.out.removesuffix("\n").split("  ")
    assert row == ["run", "sft", "step 2", "checkpoint 2", f"best eval/held/loss={value}", "done"]
    assert run.pop("last_activity")
    assert run == {
        "name": "run",
        "path": "runs/run",
        "verb": "sft",
        "run_id": json.loads((ended / "run.json").read_text())["run_id"],
        "step": 2,
        "state": "done",
        "why": "",
        "checkpoint": 2,
        "best": {"metric": "eval/held/loss", "value": about["rating"]["value"]},
    }


def test_a_run_that_somebody_copied_in_part_has_the_newest_checkpoint_that_is_there(
    ended: Path, tmp_path: Path
) -> None:
    shutil.rmtree(ended / "checkpoints/step-00000002")

    assert only(tmp_path)["checkpoint"] == 1


@pytest.mark.slow
def test_a_run_that_goes_on_and_is_stopped_by_the_clock_is_stopped(
    warm: WarmPython, ended: Path, tmp_path: Path, tree: dict[str, Any]
) -> None:
    done = started(warm, tmp_path, tree, "steps=100000", "max_minutes=0.005")

    run = only(tmp_path)

    assert done.code == 3, done.err
    last = json.loads((ended / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert run["state"] == "stopped"
    assert run["why"].startswith("max_minutes=0.005 ")
    assert run["step"] == run["checkpoint"] == last > 2


def test_a_run_that_an_observer_stopped_is_done(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    (tmp_path / "watch.py").write_text("def enough(event):\n    return 'stop' if event.step == 1 else None\n")

    done = started(warm, tmp_path, tree | {"observers": ["watch.py:enough"], "steps": 9})

    assert done.code == 0, done.err
    assert (only(tmp_path)["state"], only(tmp_path)["why"]) == ("done", BY_OBSERVER)


def test_a_run_that_failed_has_the_first_line_of_what_its_launcher_said(
    warm: WarmPython, tmp_path: Path, said: Said, tree: dict[str, Any]
) -> None:
    bug = "import os\n\n\ndef dies(event):\n    if event.step == 2:\n        os._exit(7)\n"
    (tmp_path / "watch.py").write_text(bug)

    done = started(warm, tmp_path, tree | {"observers": ["watch.py:dies"], "steps": 9})
    run = only(tmp_path)

    assert done.code == 3
    assert run["state"] == "failed"
    assert run["why"] in done.err.splitlines()
    assert numbers(run["why"]) == [0, 7, 1]
    said(run["why"])


def test_a_run_that_a_user_s_mistake_ended_has_the_mistake(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    bug = "def fails(event):\n    if event.step == 2:\n        raise ValueError('no such metric')\n"
    (tmp_path / "watch.py").write_text(bug)

    done = started(warm, tmp_path, tree | {"observers": ["watch.py:fails"], "steps": 9})
    run = only(tmp_path)

    assert done.code in {2, 3}
    assert run["state"] == "failed"
    assert re.search(r"watch\.py:fails .*\bstep 2: ValueError: .*metric", run["why"]), done.err
    assert run["checkpoint"] == 2


@pytest.mark.slow
def test_a_run_that_failed_and_was_started_again_is_done(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    bug = "import os\n\n\ndef dies(event):\n    if event.step == 2:\n        os._exit(7)\n"
    (tmp_path / "watch.py").write_text(bug)
    observed = tree | {"observers": ["watch.py:dies"], "steps": 3}
    assert started(warm, tmp_path, observed).code == 3
    (tmp_path / "watch.py").write_text(bug.replace("== 2", "== 99"))

    changed = {"resume": {"changed": ["files"]}}  # the save of step 1 may have ended before the rank did
    done = started(warm, tmp_path, observed | {"checkpoint": observed.get("checkpoint", {}) | changed})

    assert done.code == 0, done.err
    assert only(tmp_path)["state"] == "done"


@pytest.mark.slow
def test_a_run_is_running_until_all_of_it_is_killed_and_then_has_ended_without_a_word(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    launch = {"ranks": 1, "device": "cpu"}
    write_run(tmp_path / "run.yaml", tree | {"launch": launch, "steps": 100_000, "checkpoint": {"every_steps": 500}})
    live = LiveRun(tmp_path)
    try:
        live.wait_for_step(3)
        rank = live.rank(0)
        going = only(tmp_path)
        for pid in live.processes():
            os.kill(pid, signal.SIGKILL)
        live.end()
        deadline = time.monotonic() + 30  # a killed process holds its lock until the kernel has taken it down
        while (after := only(tmp_path))["state"] == "running" and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        live.close()

    assert (going["state"], going["step"] >= 3) == ("running", True)
    assert going["why"].startswith(f"process {rank} on ")
    assert after["state"] == "failed"
    assert after["why"].startswith(f"{going['why']} ended ")


def test_a_lease_of_another_host_counts_while_it_is_young(ended: Path, tmp_path: Path, said: Said) -> None:
    lease = ended / "checkpoints/.lease-00000001.json"
    lease.write_text(json.dumps({"host": "far", "pid": 12, "time": lease.stat().st_mtime + 60}))

    young = only(tmp_path)
    then = lease.stat().st_mtime - Patience().lease_stale_seconds - 1
    os.utime(lease, (then, then))
    old = only(tmp_path)

    assert (young["state"], old["state"]) == ("running", "failed")
    assert lacks(young["why"], "12 far") == lacks(old["why"], "12 far") == []
    said(young["why"])
    said(old["why"])


def test_a_report_that_a_killed_launcher_left_says_why_a_run_failed(ended: Path, tmp_path: Path) -> None:
    left = ended.parent / ".run.launch-abc"
    left.mkdir()
    values = {"rank": 1, "kind": "error", "phase": "x", "type": "OSError", "message": "gone\nfurther", "step": 2}
    (left / "failure-rank-1.json").write_text(json.dumps(values | {"time": 5.0}))
    peer = values | {"rank": 0, "kind": "peer", "type": "RankFailed", "message": "rank 1 went", "time": 4.0}
    (left / "failure-rank-0.json").write_text(json.dumps(peer))

    assert only(tmp_path)["why"] == "Rank 1: OSError: gone"


@pytest.mark.slow
def test_what_is_no_run_is_named_and_passed_over(ended: Path, tmp_path: Path) -> None:
    runs = ended.parent
    (runs / "notes").mkdir()
    for name, text in (("torn", '{"run_id'), ("foreign", '["a"]'), ("x\x1b[2J", "null")):
        (runs / name).mkdir()
        (runs / name / "run.json").write_text(text)
    shutil.copytree(ended, runs / "piped")
    (runs / "piped/metrics.jsonl").unlink()
    os.mkfifo(runs / "piped/metrics.jsonl")
    (runs / "file").write_text("x")
    (runs / ".run.dry-run").mkdir()

    done = looked(tmp_path)

    assert done.code == 0
    assert len(done.out.splitlines()) == 1
    told = done.err.splitlines()
    names = [line.partition(": ")[0].removeprefix("passed over ") for line in told]
    assert names == ["foreign", "notes", "piped", "torn", "x\\x1b[2J"]
    assert ["run.json" in line for line in told] == [True, True, False, True, True]
    assert "regular file" in json.loads(looked(tmp_path, "--json").out)["passed_over"][2]["reason"]
    assert all(len(line) <= 100 for line in told)


def test_lines_fit_into_100_columns_and_the_last_active_run_comes_first(ended: Path) -> None:
    names = ["a" * 90, "語" * 40, "b"]
    for age, name in enumerate(names):
        place = Path(shutil.copytree(ended, ended.parent / name))
        (place / "checkpoints/.lease-00000001.json").unlink()
        (place / "events.jsonl").write_text(
            json.dumps({"event": "failed", "step": 2, "reason": "語\x1b[31m" * 50, "time": 9e9}) + "\n"
        )
        for file in ("run.json", "metrics.jsonl", "events.jsonl"):
            os.utime(place / file, (1000 - age, 1000 - age))
    shutil.rmtree(ended)

    runs, passed = listed(ended.parent)
    lines = runs_table(runs)

    assert passed == []
    assert [run["name"] for run in runs] == names
    assert all(cell_len(line) <= 100 and line.isprintable() for line in lines)
    assert all("failed: 語" in line for line in lines)


def test_wide_columns_leave_the_state_its_place() -> None:
    best = {"metric": "eval/validation/completions/accuracy", "value": 0.123456}
    run = {"name": "a" * 40, "verb": "distill", "step": 123456, "checkpoint": 123456, "best": best}

    lines = runs_table([run | {"state": "stopped", "why": "Ctrl-C"}, run | {"best": None, "state": "done", "why": ""}])

    assert [line.split()[-1] for line in lines] == ["Ctrl-C", "done"]


def test_the_last_step_counts_behind_a_rewind_a_torn_line_and_much_else(ended: Path) -> None:
    file = ended / "metrics.jsonl"
    much = "".join(json.dumps({"step": step, "x": "y" * 99}) + "\n" for step in range(3, 9000))
    file.write_text(much + json.dumps({"event": "rewind", "to": 7}) + '\n{"step": 8')

    assert listed(ended.parent)[0][0]["step"] == 7


def test_a_run_itself_can_be_named_and_a_missing_directory_is_one_paragraph(
    ended: Path, tmp_path: Path, said: Said
) -> None:
    missing = looked(tmp_path, "nowhere")
    (tmp_path / "empty").mkdir()
    empty = looked(tmp_path, "empty")

    assert looked(tmp_path, "runs/run").out == looked(tmp_path).out
    assert (missing.code, missing.out) == (2, "")
    assert missing.err.startswith("nowhere ")
    assert (empty.code, empty.out) == (0, "")
    said(missing.err.strip())
    said(empty.err.strip())


def test_checkpoints_in_another_place_are_found(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    done = started(warm, tmp_path, tree | {"checkpoint": {"every_steps": 1, "storage": str(tmp_path / "elsewhere")}})

    assert done.code == 0, done.err
    assert only(tmp_path)["checkpoint"] == 2
    shutil.rmtree(tmp_path / "elsewhere/step-00000002")
    assert only(tmp_path)["checkpoint"] == 1
