"""Ranks for launcher tests: scripts of a few lines that never import torch, run by real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.config.sections.launch import LaunchConfig
from holdfast.launch.local import launch_local
from holdfast.patience import Patience

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here, launch, run = Path(os.environ["TEST_DIR"]), Path(os.environ["HOLDFAST_LAUNCH_DIR"]), Path(os.environ["TEST_RUN"])
with open(here / "pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
(here / f"started-{rank}").touch()

def attempt():
    # Counts the starts of this rank: 1, 2, ...
    with open(here / f"attempts-{rank}", "a") as file:
        file.write("x")
    return (here / f"attempts-{rank}").stat().st_size

def all_started():
    while not all((here / f"started-{other}").exists() for other in range(ranks)):
        time.sleep(0.01)

def child(new_session):
    # A grandchild of the launcher that sleeps and, like a stubborn reward worker, ignores SIGTERM.
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    command = [sys.executable, "-S", "-c", code]
    process = subprocess.Popen(command, start_new_session=new_session, stdout=subprocess.PIPE)
    process.stdout.readline()
    with open(here / "pids", "a") as file:
        file.write(f"{process.pid}\\n")

def make_run():
    run.mkdir()
    (run / "run.json").write_text("{}")
"""

DRIVER = """
import sys
from pathlib import Path
from holdfast.config.sections.launch import LaunchConfig
from holdfast.launch.local import launch_local
launch = LaunchConfig(max_restarts=int(sys.argv[3]))
code = launch_local(sys.argv[4:], int(sys.argv[2]), launch, Path(sys.argv[1]))
assert "torch" not in sys.modules
sys.exit(code)
"""


@dataclass
class Ground:
    """A place for one launch: scripts, run directory, and the pids of everything that was started."""

    path: Path
    patience: Patience = field(default_factory=lambda: Patience(settle_seconds=0.6, term_seconds=0.6, kill_seconds=2.0))

    @property
    def run(self) -> Path:
        return self.path / "runs" / "demo"

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "TEST_DIR": str(self.path), "TEST_RUN": str(self.run)}

    def command(self, script: str) -> list[str]:
        return [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(script)]

    def launch(self, script: str, ranks: int = 2, max_restarts: int = 0) -> int:
        """Run the launcher in this process."""
        launch = LaunchConfig(max_restarts=max_restarts)
        return launch_local(self.command(script), ranks, launch, self.run, self.environ, self.patience)

    def driver(self, script: str, ranks: int = 2, max_restarts: int = 0) -> list[str]:
        """Return the argv of a launcher in a process of its own, with the times users get."""
        numbers = [str(ranks), str(max_restarts)]
        return [sys.executable, "-c", DRIVER, str(self.run), *numbers, *self.command(script)]

    def pids(self) -> list[int]:
        return [int(line) for line in (self.path / "pids").read_text().split()]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_alive(pid)]

    def hidden(self) -> list[Path]:
        return sorted(self.run.parent.glob(".demo.launch-*"))

    def wait_for(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "what the test waits for did not happen"
            time.sleep(0.02)

    def wait_until_started(self, ranks: int = 2) -> None:
        self.wait_for(lambda: all((self.path / f"started-{rank}").exists() for rank in range(ranks)))


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """One launch's ground; nothing of it may run when the test is over."""
    ground = Ground(tmp_path)

    yield ground

    left = ground.alive() if (tmp_path / "pids").exists() else []
    for pid in left:
        subprocess.run(["kill", "-9", str(pid)], check=False)
    assert left == []
