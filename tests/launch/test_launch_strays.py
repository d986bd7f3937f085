"""What rewards start and leave behind is gone soon after the launcher, whatever ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launch.conftest import Ground

RANK = """
    import os, sys, time
    from pathlib import Path
    from holdfast.config.sections.reward import RewardPoolConfig, UserRewardConfig
    from holdfast.rewards.base import Sample
    from holdfast.rewards.processes.pool import RewardPool

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_detached_children_of_rewards_do_not_outlive_a_launcher(ground: Ground, number: signal.Signals) -> None:
    """They have an empty environment and a session of their own, and one has a child."""
    (ground.path / "my.py").write_text(textwrap.dedent(REWARD))
    driver = ground.driver("", ranks=1)
    command = [*driver[: -len(ground.command(""))], sys.executable, "-c", textwrap.dedent(RANK)]
    launcher = subprocess.Popen(command, env=ground.environ, stderr=subprocess.DEVNULL)
    try:
        ground.wait_for((ground.path / "started").exists, 60)
        assert len(set(ground.alive())) == 6, "rank, supervisor, worker, three children"

        launcher.send_signal(number)
        launcher.wait(30)

        ground.wait_for(lambda: not ground.alive(), 15)
        assert not strays(ground.path)
    finally:
        launcher.kill()
        launcher.wait()


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
