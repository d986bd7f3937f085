"""A rank that is stopped, or late, in a save of the trainer: named with its phase, in words of ours."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoint import verify
from holdfast.parallel.mesh import World
from tests.cli.warm import WarmPython
from tests.crash.killed import command
from tests.crash.runs import SlowChannel, saved_steps, values_of
from tests.training.cases import run

PHASES = ("shards", "rank state", "collect", "read back")
SAVING = ("checkpoint.timeout_minutes=0.15", "steps=100000", "checkpoint.rehearsal=false")
"""A save may take nine seconds; a step may wait half an hour for another rank."""


def note_of(place: Path) -> tuple[Path, int] | None:
    """Return where rank 1 notes the phase of its save, and the process that holds this file open."""
    for process in psutil.process_iter():
        try:
            if process.cwd() != str(place):
                continue
            notes = [file.path for file in process.open_files() if file.path.endswith("background-rank-1")]
            if notes:
                return Path(notes[0]), process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return None


def stop_in_a_save(job: subprocess.Popen[str], place: Path) -> tuple[int, str]:
    """Stop rank 1 while a save of it is in one of the phases; return its process id and the phase."""
    found = None
    while found is None:
        assert job.poll() is None, job.communicate()[0]
        found = note_of(place)
    note, rank = found
    while True:
        assert job.poll() is None, job.communicate()[0]
        if note.read_text().strip() in PHASES:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.05)
            phase = note.read_text().strip()
            if phase in PHASES:
                return rank, phase
            os.kill(rank, signal.SIGCONT)
        time.sleep(0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_in_a_save_is_named_with_its_phase_within_the_time_out(
    warm: WarmPython, tmp_path: Path, background: bool
) -> None:
    words = [*SAVING, f"checkpoint.background={str(background).lower()}"]
    job = subprocess.Popen(
        [warm.program, *command(tmp_path, *words)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stopped, phase = stop_in_a_save(job, tmp_path)
    began = time.monotonic()

    try:
        said, _ = job.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher ends what it started, which is a stand-in here
            os.kill(stopped, signal.SIGKILL)

    assert job.returncode == 3, said
    assert time.monotonic() - began < 60
    assert re.search(
        rf"rank 1 has stopped answering( in phase '[^']+')?( at step \d+)?, in phase '{phase}' of its save", said
    ), said
    for foreign in ("gloo", "Traceback", "Connection closed", "ms for"):
        assert foreign not in said
    for step in saved_steps(tmp_path):
        assert verify(str(tmp_path / f"r/checkpoints/step-{step:08d}")).step == step


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_save_is_named_although_saves_may_take_long(
    warm: WarmPython, tmp_path: Path
) -> None:
    """Training waits nine seconds for a rank, a save half an hour: the save in flight must not hold the news up."""
    words = ["steps=100000", "checkpoint.rehearsal=false", "launch.timeout_minutes=0.15"]
    job = subprocess.Popen(
        [warm.program, *command(tmp_path, *words, "checkpoint.timeout_minutes=30", "checkpoint.grace_seconds=3")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stopped, _ = stop_in_a_save(job, tmp_path)

    try:
        said, _ = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)

    assert job.returncode == 3, said
    assert "Rank 1 hangs" in said or "rank 1 has stopped answering" in said, said


def run_with_a_late_save(world: World, values: dict[str, Any], seconds: float) -> tuple[int, str]:
    """Run; rank 1 is late to a phase of its first save. Return the last step, and what was printed."""
    channel: Any = OnceSlow(world.failure, "rank state", seconds if world.rank == 1 else 0.0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        outcome = run(replace(world, failure=channel), values)
    return outcome.step, said.getvalue()


class OnceSlow(SlowChannel):
    """Holds the first save up, and no other."""

    def in_background(self, name: str) -> None:
        super().in_background(name)
        if name == self._phase:
            self._seconds = 0.0


@pytest.mark.slow
def test_saves_go_on_after_one_that_a_rank_was_late_to(pools: Any, tmp_path: Path) -> None:
    values = values_of(
        tmp_path,
        steps=4,
        checkpoint={
            "timeout_minutes": 5.0 / 60,
            "max_failures": 1,
            "every_steps": 1,
            "background": False,
            "rehearsal": False,
        },
    )

    (first, told), (second, _) = pools(2).run(run_with_a_late_save, values, 11.0)

    assert (first, second) == (4, 4)
    words = "warning: rank 0 waited until its time was over in phase 'rank state' of the save of step 1: "
    assert f"{words}rank 1 is in phase 'rank state' of its save. Training goes on" in told
    assert "gloo" not in told
    assert saved_steps(tmp_path) == [2, 3, 4]
    for step in (2, 3, 4):
        assert verify(str(tmp_path / f"r/checkpoints/step-{step:08d}")).step == step
