"""What rewards start and leave behind is gone soon after the launcher, whatever ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from holdfast.launch import processes
from tests.launch.conftest import Ground

RANK = """
    import os, sys, time
    from pathlib import Path
    from holdfast.config.sections.reward import RewardPoolConfig, UserRewardConfig
    from holdfast.rewards.base import Sample
    from holdfast.rewards.pool import RewardPool

    here = Path(os.environ["TEST_DIR"])
    def noted(pid):
        with open(here / "pids", "a") as file:
            file.write(f"{pid}\\n")
    noted(os.getpid())
    with RewardPool([UserRewardConfig(path="my.py:reward")], RewardPoolConfig(workers=2), here, here) as pool:
        noted(pool._process.pid)
        pool.score([Sample(0, "", "", [], [], "stop", {})])
        (here / "scored").touch()
        pool.score([Sample(1, "", "", [], [], "stop", {})])
"""
REWARD = """
    import os, subprocess, time
    from pathlib import Path
    here = Path(__file__).parent
    def noted(pid):
        with open(here / "pids", "a") as file:
            file.write(f"{pid}\\n")
    def reward(sample_id):
        noted(os.getpid())
        if sample_id == 0: return 1
        deep = f"/bin/sleep 601 & echo $! >> {here}/pids; wait"
        for command in (["/bin/sleep", "600"], ["/bin/sh", "-c", deep]):
            noted(subprocess.Popen(command, env={}, start_new_session=True).pid)
        while (here / "pids").read_text().count("\\n") < 7: time.sleep(0.02)
        (here / "started").touch()
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "guarded"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGKILL, False)]
)
def test_detached_children_of_rewards_do_not_outlive_a_launcher(
    ground: Ground, number: signal.Signals, guarded: bool
) -> None:
    """They have an empty environment and a session of their own, and one has a child; the guard may be killed too."""
    (ground.path / "my.py").write_text(textwrap.dedent(REWARD))
    driver = ground.driver("", ranks=1)
    command = [*driver[: -len(ground.command(""))], sys.executable, "-c", textwrap.dedent(RANK)]
    launcher = subprocess.Popen(command, env=ground.environ, stderr=subprocess.DEVNULL)
    try:
        ground.wait_for((ground.path / "started").exists, 60)
        assert len(set(ground.alive())) == 6, "rank, supervisor, worker, three children"

        if not guarded:
            psutil.Process(guard_of(launcher.pid)).kill()
        launcher.send_signal(number)
        launcher.wait(30)

        ground.wait_for(lambda: not ground.alive(), 15 if guarded else 5)
        assert not strays(ground.path)
    finally:
        launcher.kill()
        launcher.wait()


def guard_of(launcher: int) -> int:
    (guard,) = (each.pid for each in psutil.Process(launcher).children() if processes.__file__ in each.cmdline())
    return guard


@pytest.mark.parametrize(
    "busy", ["time.sleep(600)", "re.match('(a|aa)+$', 'a' * 60 + 'b')"], ids=["asleep", "deep in C"]
)
def test_ranks_end_with_a_launcher_that_is_killed_with_its_guard(ground: Ground, busy: str) -> None:
    """The second holds the interpreter's lock, so that no thread of the rank could end it."""
    script = f"""
        import re
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        all_started()
        {busy}
    """
    launcher = subprocess.Popen(ground.driver(script), env=ground.environ, stderr=subprocess.DEVNULL)
    ground.wait_until_started()
    for pid in (guard_of(launcher.pid), launcher.pid):
        psutil.Process(pid).kill()
    launcher.wait(30)

    ground.wait_for(lambda: not ground.alive(), 5)


def strays(folder: Path) -> list[str]:
    """Return the command lines that still stand in this test's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found
