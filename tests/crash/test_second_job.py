"""A second job of the real command on a run's directory: refused, the first one named and none the worse for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.checkpoint.place.layout import lease_name
from tests.cli.warm import WarmPython
from tests.crash.killed import command, start
from tests.crash.runs import log_of, saved_steps, state_differences

PAUSE = """
import time
from pathlib import Path

from holdfast.checkpoint.place.layout import lease_name
def waits_at_three(event):
    if event.step == 3:
        Path("at three").touch()
        while not Path("go on").exists():
            time.sleep(0.01)
"""
OBSERVED = ("observers=[watch.py:waits_at_three]",)


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    (place / "watch.py").write_text(PAUSE)
    (place / "go on").touch()
    code, said = start(warm, place, None, *OBSERVED)
    assert code == 0, said
    return place


def begin(warm: WarmPython, place: Path) -> subprocess.Popen[str]:
    (place / "watch.py").write_text(PAUSE)
    return subprocess.Popen(
        [warm.program, *command(place, *OBSERVED)],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [pytest.param(2, id="20-second job while the first one trains")])
def test_a_second_job_is_refused_and_the_first_one_is_what_it_would_have_been(
    warm: WarmPython, straight: Path, tmp_path: Path, seconds: int
) -> None:
    first = begin(warm, tmp_path)
    while not (tmp_path / "at three").exists():
        assert first.poll() is None, first.communicate()[0]

    refused = [start(warm, tmp_path, None, *OBSERVED) for _ in range(seconds)]
    (tmp_path / "go on").touch()
    said, _ = first.communicate(timeout=120)

    for code, words in refused:
        assert code == 2
        assert re.search(r"^r is in use by another job \(process \d+ on \S+\)\. Wait for it, stop it, or", words, re.M)
        assert "Traceback" not in words
    assert first.returncode == 0, said
    assert saved_steps(tmp_path) == [6, 8]
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []


@pytest.mark.parametrize("jobs", [pytest.param(3, id="20-jobs that start at the same moment", marks=pytest.mark.slow)])
def test_of_jobs_that_start_together_one_trains_and_the_others_are_refused(
    warm: WarmPython, straight: Path, tmp_path: Path, jobs: int
) -> None:
    started = [begin(warm, tmp_path) for _ in range(jobs)]
    while sum(job.poll() is None for job in started) > 1:
        pass
    (tmp_path / "go on").touch()

    told = [job.communicate(timeout=120)[0] for job in started]

    assert sorted(job.returncode for job in started) == [0] + [2] * (jobs - 1), told
    assert sum("is in use by another job" in words for words in told) == jobs - 1
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, id="20-job after the holder of the directory was killed")])
def test_the_directory_of_a_job_that_was_killed_is_taken_at_once(
    warm: WarmPython, straight: Path, tmp_path: Path, rank: int
) -> None:
    first = begin(warm, tmp_path)
    while not (tmp_path / "at three").exists():
        assert first.poll() is None, first.communicate()[0]
    holder = re.search(r'"pid": (\d+)', (tmp_path / "r/checkpoints" / lease_name(1)).read_text())
    assert holder is not None
    os.kill(int(holder[1]), signal.SIGKILL)
    said, _ = first.communicate(timeout=120)
    (tmp_path / "go on").touch()

    code, words = start(warm, tmp_path, None, *OBSERVED)

    assert first.returncode == 3
    assert f"Rank {rank} was killed by SIGKILL" in said
    assert code == 0, words
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []
