"""`launch.min_ranks`: a run goes on with the ranks that are left, and bad values are refused before any effect."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from holdfast.launch.fewer import fewer_ranks
from holdfast.launch.local import launch_local
from holdfast.launch.verdict import Death, lost_ranks
from holdfast.parallel.failure.reports import Failure
from tests.cli.in_process import cli_in_process
from tests.launch.conftest import Ground

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_sort.yaml"
KILLED = """
number = attempt()
if rank == 0:
    with open(here / "sizes", "a") as file:
        file.write(f"{ranks} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    (launch / "step").write_text(str(10 * number))
    (here / f"ready-{number}").touch()
if rank == VICTIM and (ranks > LAST or number <= LEAST):
    while not (here / f"ready-{number}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.1 if ranks <= LAST and number > LEAST else 60)
"""


def config(fewest: int | None, **parallel: Any) -> SFTConfig:
    tree = {"steps": 1, "model": {"path": "m"}, "data": {"path": "rows"}}
    return from_mapping(tree | {"launch": {"min_ranks": fewest}, "parallel": parallel}, SFTConfig)


def launch(  # noqa: PLR0913
    ground: Ground,
    last: int,
    fewer: list[int],
    *,
    ranks: int = 3,
    max_restarts: int = 0,
    gpus: int = 0,
    victim: str = "1",
    least: int = 0,
) -> int:
    """Start ranks of which one kills itself as long as there are more than `last`, and in the first attempts."""
    visible = ",".join(str(4 + gpu) for gpu in range(gpus))
    environ = {**ground.environ, "CUDA_VISIBLE_DEVICES": visible, "PATH": f"{ground.path}:{os.environ['PATH']}"}
    program = ground.path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo "GPU $gpu: a stand-in"; done\n')
    program.chmod(0o755)
    section = LaunchConfig(max_restarts=max_restarts)
    script = KILLED.replace("LAST", str(last)).replace("LEAST", str(least)).replace("VICTIM", victim)
    return launch_local(ground.command(script), ranks, section, ground.run, environ, ground.patience, fewer)


def sizes(ground: Ground) -> list[str]:
    """Return the ranks of each attempt, and the GPUs that they saw."""
    return (ground.path / "sizes").read_text().splitlines()


def test_a_run_goes_on_without_the_ranks_that_are_lost_until_too_few_are_left(
    ground: Ground, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = launch(ground, last=1, fewer=[2])

    assert ended == 3
    assert [line.split()[0] for line in sizes(ground)] == ["3", "2"]
    assert "2 of 3 ranks" in capfd.readouterr().err


def test_a_run_goes_on_with_as_many_ranks_as_can_share_the_model(ground: Ground) -> None:
    ended = launch(ground, last=2, fewer=[2], ranks=4)

    assert ended == 0
    assert [line.split()[0] for line in sizes(ground)] == ["4", "2"]


def test_after_the_last_rank_that_may_be_lost_a_restart_has_all_of_them_again(ground: Ground) -> None:
    ended = launch(ground, last=1, fewer=[2], max_restarts=1)

    assert ended == 3
    assert [line.split()[0] for line in sizes(ground)] == ["3", "2", "3", "2"]


def test_the_gpu_of_a_lost_rank_is_not_used_again(ground: Ground) -> None:
    ended = launch(ground, last=2, fewer=[2, 3], ranks=4, gpus=4)

    assert ended == 0
    assert sizes(ground) == ["4 4,5,6,7", "3 4,6,7", "2 4,7"]


def test_a_gpu_that_was_spare_takes_the_place_of_a_lost_one(ground: Ground) -> None:
    ended = launch(ground, last=2, fewer=[2], ranks=4, gpus=4, victim="(1, 0)[number > 1]", least=2)

    assert ended == 0
    assert sizes(ground) == ["4 4,5,6,7", "2 4,6", "2 6,7"]


def test_a_full_disk_costs_no_rank() -> None:
    deaths = [
        Death(
            rank,
            3,
            rank,
            "save",
            Failure(rank, kind, "save", "OSError", "", 3, rank, of_disk=kind == "error"),
            "",
            False,
        )
        for rank, kind in enumerate(("error", "peer"))
    ]

    assert lost_ranks(deaths) == frozenset()
    assert lost_ranks([replace(deaths[0], report=None, exit_code=-signal.SIGABRT), deaths[1]]) == {0}


def test_the_numbers_of_ranks_are_those_that_can_share_the_model() -> None:
    assert fewer_ranks(config(None), 8) == []
    assert fewer_ranks(config(5), 8) == [5, 6, 7]
    assert fewer_ranks(config(2, context=2), 8) == [2, 4, 6]
    assert fewer_ranks(config(4, replicate=2), 4) == []


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (config(5), {"min_ranks=5", "4 ranks"}),
        (config(3, replicate=2), {"min_ranks=3", "replicate=2", "Set it to 4"}),
        (config(3, context=2), {"min_ranks=3", "context=2", "Set it to 4"}),
        (config(2, shard=3), {"min_ranks=2", "shard=3", "Set it to 3"}),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_with_the_values(section: SFTConfig, values: set[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        fewer_ranks(section, 4)

    assert all(value in str(refused.value) for value in values)


@pytest.mark.parametrize("value", ["0", "3"])
def test_a_refused_command_is_one_paragraph_exit_code_2_and_leaves_nothing(tmp_path: Path, value: str) -> None:
    done = cli_in_process("sft", EXAMPLE, f"launch.min_ranks={value}", f"run.dir={tmp_path / 'runs'}", cwd=tmp_path)

    assert done.code == 2
    assert "launch.min_ranks" in done.err and "\n\n" not in done.err.strip()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_on_from_its_last_checkpoint_and_grows_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = [
        *("launch.ranks=2", "launch.min_ranks=1", "launch.device=cpu", "data.synthetic.rows=512", "data.batch_size=7"),
        *("evaluation.sets={}", "evaluation.completions=null", "checkpoint.every_steps=5", "metrics.log_every=1"),
        *(f"run.dir={tmp_path}", "run.name=run", "checkpoint.export_at_end=false"),
    ]
    command = [sys.executable, "-m", "holdfast.cli.main", "sft", str(EXAMPLE), *values]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}

    with subprocess.Popen([*command, "steps=30"], env=environ, stderr=subprocess.PIPE, text=True) as training:
        wait_for(lambda: steps_of(run)[-1:] >= [7])
        os.kill(rank_of(training.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        wait_for(lambda: len(starts(run)) > 1 and steps_of(run, since_rewind=True))
        seconds = time.monotonic() - killed
        words = training.communicate(timeout=900)[1]

    lost = len(steps_of(run)) - len(set(steps_of(run)))
    print(f"{seconds:.1f} s to the next step, {lost} steps made again")
    assert training.returncode == 0, words
    assert "1 of 2 ranks" in words
    assert 0 <= lost <= 7
    assert starts(run) == [2, 1]
    assert sorted(set(steps_of(run))) == list(range(1, 31))

    assert subprocess.run([*command, "steps=32"], env=environ, check=False, capture_output=True).returncode == 0

    assert starts(run) == [2, 1, 2]


def starts(run: Path) -> list[int]:
    """Return the ranks of every start."""
    return [line["ranks"] for line in lines_of(run / "events.jsonl") if line["event"] == "start"]


def lines_of(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps_of(run: Path, *, since_rewind: bool = False) -> list[int]:
    """Return the steps that were made, in their order, those that were made again twice."""
    lines = lines_of(run / "metrics.jsonl")
    rewinds = [index for index, line in enumerate(lines) if line.get("event") == "rewind"]
    first = (rewinds[-1] if rewinds else len(lines)) if since_rewind else 0
    return [line["step"] for line in lines[first:] if "loss" in line]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.1)


def rank_of(launcher: int, rank: int) -> int:
    """Return the process of a rank."""
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.environ().get("RANK") == str(rank):
                return int(child.pid)
    raise AssertionError(f"no rank {rank}")
