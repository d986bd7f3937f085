"""A file system that blocks for good below a save: the rank and the phase are named, and the command ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.warm import WarmPython
from tests.crash.killed import command

OBSERVER = """
import os, subprocess, sys

def pins_become_a_pipe(event):
    if event.step == 1:  # retention reads the pins; nobody ever writes to this pipe
        os.mkfifo("r/checkpoints/pins.json")
"""
HOLDER = """
import fcntl, os, pathlib, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks the holder to give way; it does not
folder, held = pathlib.Path(sys.argv[1]), {}
pathlib.Path("holding").touch()
while True:
    for file in folder.glob(".staging-step-00000002*/tensors/shard-00002-*.safetensors"):
        if file.stat().st_ino not in held:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:
                os.close(descriptor)  # still being written
            else:
                held[file.stat().st_ino] = descriptor
    time.sleep(0.0002)
"""
"""Takes a lease on a shard of step 2, as a file server does: the rank that reads it back waits in the kernel."""

QUICK = ("checkpoint.timeout_minutes=0.05", "steps=100000", "checkpoint.rehearsal=false")
"""Three seconds for a save, and half a minute for the ranks to notice it one after the other."""


def ended(warm: WarmPython, place: Path, *overrides: str) -> tuple[int, str, float]:
    """Run to the end, which must come; return exit code, what was said, and the seconds it took."""
    (place / "watch.py").write_text(OBSERVER)
    began = time.monotonic()
    run = subprocess.run(
        [warm.program, *command(place, *QUICK, *overrides)],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    return run.returncode, run.stdout + run.stderr, time.monotonic() - began


def left_of(place: Path) -> list[psutil.Process]:
    """Return processes that still work in a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(place) and process.pid != os.getpid():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, id="21-read of a pipe blocks rank 0's save in the background", marks=pytest.mark.slow)]
)
def test_a_save_that_hangs_in_the_background_is_named_with_its_rank_and_phase(
    warm: WarmPython, tmp_path: Path, ranks: int
) -> None:
    code, said, seconds = ended(warm, tmp_path, "observers=[watch.py:pins_become_a_pipe]", f"launch.ranks={ranks}")

    assert code == 3, said
    assert "a save has hung for more than 0.05 minutes: rank 0 in phase 'retention'." in said
    assert "Look at the file system of that rank." in said
    assert "Traceback" not in said
    assert seconds < 120
    assert left_of(tmp_path) == []
    assert (tmp_path / "r/checkpoints/step-00000002/manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="21-read of a pipe blocks rank 0's save that is waited for")])
def test_a_save_that_hangs_while_it_is_waited_for_is_named_with_its_rank_and_phase(
    warm: WarmPython, tmp_path: Path, ranks: int
) -> None:
    code, said, seconds = ended(
        warm,
        tmp_path,
        "observers=[watch.py:pins_become_a_pipe]",
        "checkpoint.background=false",
        f"launch.ranks={ranks}",
    )

    assert code == 3, said
    assert "a save has hung for more than 0.05 minutes: rank 0 in phase 'retention'." in said
    assert "Traceback" not in said
    assert seconds < 120
    assert left_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="21-lease of a file server blocks a rank that reads back")])
def test_a_rank_that_hangs_while_it_reads_back_is_named(warm: WarmPython, tmp_path: Path, ranks: int) -> None:
    """The kernel breaks such a lease by force after 45 seconds, which is later than the run gives up."""
    if float(Path("/proc/sys/fs/lease-break-time").read_text()) < 45:
        pytest.skip("leases end too soon on this machine")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, "r/checkpoints"], cwd=tmp_path)
    try:
        while not (tmp_path / "holding").exists():
            time.sleep(0.01)
        code, said, _ = ended(warm, tmp_path, f"launch.ranks={ranks}")
    finally:
        holder.kill()
        holder.wait()

    assert code == 3, said
    assert re.search(r"a save has hung for more than 0\.05 minutes: rank [01] in phase 'read back'\. Look", said)
    assert left_of(tmp_path) == []
