"""The real command on two ranks, interrupted, terminated and killed while it trains."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import BY_OBSERVER, read_metrics
from tests.cli.commands import LiveRun
from tests.cli.fixtures import write_rows, write_run
from tests.cli.screens import ended
from tests.cli.warm import Done, WarmPython

FUNCTIONS = """
import subprocess, time
from pathlib import Path

def says_every_row(row):
    print("looking at", row["prompt"], flush=True)
    return True

def hangs_at_three(event):
    if event.step == 3:
        subprocess.Popen(["sleep", "600"])
        Path("hangs").touch()
        time.sleep(600)

def stops_at_three(event):
    return "stop" if event.step == 3 else None

def evaluates_and_saves_at_two(event):
    return ["evaluate", "save"] if event.step == 2 else None
"""


@pytest.fixture
def endless(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree that trains for longer than any test waits, with functions for it to name."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tree | {"steps": 100_000}


@pytest.fixture
def start(tmp_path: Path, warm: WarmPython) -> Iterator[Callable[..., LiveRun]]:
    """Return a function that starts the command on a tree; nothing of it outlives the test."""
    started = []

    def begin(tree: dict[str, Any], *, as_users_do: bool = False) -> LiveRun:
        write_run(tmp_path / "run.yaml", tree)
        started.append(LiveRun(tmp_path, warm=None if as_users_do else warm))
        return started[-1]

    yield begin
    for run in started:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        pytest.param(LiveRun.press_ctrl_c, "Ctrl-C", id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(LiveRun.terminate, "SIGTERM", id="SIGTERM"),
    ],
)
def test_the_first_request_saves_and_stops_the_run_after_its_step_and_says_so(
    start: Any, endless: dict[str, Any], ask: Callable[[LiveRun], None], reason: str
) -> None:
    run = start(endless, as_users_do=True)
    run.wait_for_step(3)

    ask(run)
    done, seconds = run.end()

    assert done.code == 3, done.err
    assert seconds < 15
    assert f"second {reason} " in done.err
    assert "Traceback" not in done.err
    why, last, place = ended(done.out)
    assert (why, place) == (f"stopped by {reason}", "runs/run")
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert {"loss", "grad_norm", "num_tokens"} <= lines[-1].keys()
    assert (run.directory / "checkpoints" / f"step-{last:08d}").is_dir()
    assert run.processes() == {}


@pytest.mark.slow
def test_sigusr1_saves_and_the_run_goes_on(start: Any, endless: dict[str, Any]) -> None:
    # Real ranks: a warm one passes signals on from its first moment, before the run has a handler for them.
    tree = endless | {"checkpoint": {"at_end": False, "export_at_end": False, "keep": {"last": 9}}}
    run = start(tree, as_users_do=True)
    run.wait_for(lambda: any(b"RANK=1" in environ for environ in run.processes().values()))
    run.ask_for_a_save()  # while the ranks start
    saved = run.directory / "checkpoints"
    run.wait_for(lambda: len(list(saved.glob("step-*"))) == 1)
    first = int(next(saved.glob("step-*")).name.removeprefix("step-"))
    run.wait_for_step(first + 5)

    run.ask_for_a_save()
    run.wait_for(lambda: len(list(saved.glob("step-*"))) == 2)
    second = max(int(path.name.removeprefix("step-")) for path in saved.glob("step-*"))
    run.wait_for_step(second + 3)
    os.kill(run.rank(1), signal.SIGUSR1)  # one rank speaks for all
    run.wait_for(lambda: len(list(saved.glob("step-*"))) == 3)
    run.terminate()
    done, _ = run.end()

    assert done.code == 3, done.err
    assert second > first
    assert done.err.count("SIGUSR1: ") == 2
    assert [line["step"] for line in run.lines()] == list(range(1, len(run.lines()) + 1))


def test_ctrl_c_while_ranks_still_start_leaves_no_process_and_no_run_directory(
    start: Any, endless: dict[str, Any]
) -> None:
    run = start(endless, as_users_do=True)
    run.wait_for(lambda: any(b"RANK=1" in environ for environ in run.processes().values()))

    run.press_ctrl_c()
    done, seconds = run.end()

    assert done.code == 3
    assert seconds < 15
    assert "second Ctrl-C " in done.err
    assert not run.directory.exists()
    assert run.processes() == {}


@pytest.mark.slow
def test_a_second_ctrl_c_ends_everything_at_once(start: Any, endless: dict[str, Any], tmp_path: Path) -> None:
    """The step hangs, so that no orderly stop can come first; a grandchild of the command hangs with it."""
    run = start(endless | {"observers": ["functions.py:hangs_at_three"]})
    run.wait_for((tmp_path / "hangs").exists)
    run.press_ctrl_c()
    run.wait_for(lambda: "second Ctrl-C " in run.told)
    before = run.processes()

    run.press_ctrl_c()
    done, seconds = run.end()

    assert done.code == 3
    assert seconds < 10
    assert len(before) >= 4  # the command, two ranks and the grandchild; who guards them has an environment of its own
    assert run.processes() == {}
    assert [line["step"] for line in run.lines()] == [1, 2]


def test_a_killed_rank_is_named_with_its_signal_and_last_words_and_nothing_outlives_it(
    start: Any, endless: dict[str, Any]
) -> None:
    endless["data"]["filter"] = "functions.py:says_every_row"
    run = start(endless)
    run.wait_for_step(3)

    os.kill(run.rank(1), signal.SIGKILL)
    done, seconds = run.end()

    assert done.code == 3
    assert seconds < 10
    assert run.processes() == {}
    named = re.search(r"^Rank 1 .*\bSIGKILL\b.* step (\d+)\.", done.err, re.MULTILINE)
    assert named is not None, done.err
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert abs(int(named.group(1)) - len(lines)) <= 1
    last_words = (run.directory / "logs" / "rank-1.log").read_text().splitlines()[-1]
    assert re.fullmatch(r"looking at add \d+=", last_words)
    assert f" runs/run/logs/rank-1.log:\n    {last_words[:7]}" in done.err
    assert f"    {last_words}\n" in done.err
    assert "Rank 1" in (run.directory / "logs" / "rank-0.log").read_text()


def sft(warm: WarmPython, directory: Path, tree: dict[str, Any]) -> Done:
    (directory / "functions.py").write_text(FUNCTIONS)
    write_run(directory / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=directory)


def test_the_clock_ends_a_run_with_code_3(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    done = sft(warm, tmp_path, tree | {"steps": 100_000, "max_minutes": 0.01})

    assert done.code == 3, done.err
    why, last, _ = ended(done.out)
    assert why.startswith("max_minutes=0.01 ")
    assert len(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")) == last


SLOW = """
import time
time.sleep(8)  # as long as weights may take to be read

def takes_all(row):
    return True
"""


@pytest.mark.slow
def test_the_clock_counts_what_comes_before_the_first_step(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    tree["data"]["filter"] = "slow.py:takes_all"

    done = sft(warm, tmp_path, tree | {"steps": 100_000, "max_minutes": 0.1})

    assert done.code == 3, done.err
    why, last, _ = ended(done.out)
    assert why.startswith("max_minutes=0.1 ")
    assert last == 1


def test_an_observer_that_stops_ends_a_run_with_code_0(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    done = sft(warm, tmp_path, tree | {"steps": 100_000, "observers": ["functions.py:stops_at_three"]})

    assert done.code == 0, done.err
    assert ended(done.out) == (BY_OBSERVER, 3, "runs/run")
    assert len(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")) == 3


def test_an_observer_asks_for_an_evaluation_and_a_checkpoint(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"sub {n}=", "completion": str(n)} for n in range(7)])
    evaluation = {"sets": {"held": {"path": "held.jsonl"}}, "at_end": False}
    observers = ["functions.py:evaluates_and_saves_at_two"]
    checkpoint = {"at_end": False, "export_at_end": False}
    tree |= {"steps": 4, "evaluation": evaluation, "observers": observers, "checkpoint": checkpoint}

    done = sft(warm, tmp_path, tree)

    assert done.code == 0, done.err
    run = tmp_path / "runs" / "run"
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/held/loss" in line] == [2]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_a_dry_run_by_command_leaves_nothing_beside_the_configuration(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    done = sft(warm, tmp_path, tree | {"dry_run": True})

    assert done.code == 0, done.err
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []
