"""What the processes behind a pool cost, hold, and leave behind when their rank ends in any way."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.sections.reward import RewardPoolConfig
from holdfast.processes import framing
from holdfast.rewards.pool import RewardPool
from tests.rewards.conftest import Start, is_alive, samples, user, wait_for

RANK = """
    import os, sys, time
    from pathlib import Path
    from holdfast.config.sections.reward import RewardPoolConfig, UserRewardConfig
    from holdfast.rewards.base import Sample
    from holdfast.rewards.pool import RewardPool

    here = Path(sys.argv[1])
    config = RewardPoolConfig(workers=2, timeout_seconds=600)
    with RewardPool([UserRewardConfig(path="my.py:reward")], config, here, here) as pool:
        if len(sys.argv) > 2 and os.fork() == 0:
            (here / "holder").write_text(str(os.getpid()))
            time.sleep(600)
            os._exit(0)
        try:
            pool.score([Sample(i, "", "", [], [], "stop", {}) for i in range(2)])
        except KeyboardInterrupt:
            (here / "interrupted").touch()
            time.sleep(600)
"""
HANGS = """
    import os, subprocess, time
    from pathlib import Path
    def reward(sample_id):
        pids = [os.getppid(), os.getpid()]
        for own_session in (False, True):
            pids.append(subprocess.Popen(["sleep", "600"], start_new_session=own_session).pid)
        (Path(__file__).parent / f"made-{sample_id}").write_text(" ".join(map(str, pids)))
        (Path(__file__).parent / f"pids-{sample_id}").touch()
        time.sleep(600)
"""


class Rank:
    """A process that scores two samples that hang."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "my.py").write_text(textwrap.dedent(HANGS))
        (folder / "rank.py").write_text(textwrap.dedent(RANK))
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, str(folder / "rank.py"), str(folder), *arguments])
        assert wait_for(lambda: len(list(folder.glob("pids-*"))) == 2, 30)
        self.pids = {int(pid) for made in folder.glob("made-*") for pid in made.read_text().split()}

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if is_alive(pid)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        holder = self.folder / "holder"
        for pid in [*self.alive(), *([int(holder.read_text())] if holder.exists() else [])]:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(tmp_path, *getattr(request, "param", ()))
    yield made
    made.close()


@pytest.mark.parametrize("rank", [(), ("a child holds the pipes open",)], indirect=True)
def test_a_killed_rank_leaves_no_process(rank: Rank) -> None:
    assert len(rank.alive()) == 7  # the supervisor, two workers, two children of each

    rank.process.send_signal(signal.SIGKILL)

    assert wait_for(lambda: not rank.alive(), 5), rank.alive()


def test_an_interrupted_score_leaves_no_process(rank: Rank) -> None:
    assert len(rank.alive()) == 7

    rank.process.send_signal(signal.SIGINT)

    assert wait_for((rank.folder / "interrupted").exists, 5)
    assert rank.alive() == []


def test_the_signals_of_a_scheduler_end_workers_and_not_the_supervisor(start: Start) -> None:
    """A rank that saves before it ends still wants its rewards."""
    pool = start("import os\ndef reward(completion): return {'reward': 1, 'own': os.getpid(), 'above': os.getppid()}",
                 workers=1)  # fmt: skip
    before = pool.score(samples("a"))[0].parts
    worker, supervisor = int(before["reward/own"] or 0), int(before["reward/above"] or 0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(supervisor, number)
    os.kill(worker, signal.SIGTERM)
    assert wait_for(lambda: not is_alive(worker))

    after = pool.score(samples("a"))[0].parts
    assert after["reward/above"] == supervisor
    assert after["reward/own"] != worker


def test_a_worker_holds_no_heavy_library(start: Start) -> None:
    pool = start("""
        import sys
        HEAVY = ("torch", "numpy", "transformers", "pydantic", "tenacity", "asyncio", "subprocess")
        def reward(completion):
            return {"reward": 0, **{name: name in sys.modules for name in HEAVY}}
        """)  # fmt: skip

    parts = dict(pool.score(samples("a"))[0].parts)

    assert not any(parts.values()), parts


def test_the_worker_module_imports_alone() -> None:
    code = """
import sys
import holdfast.processes.worker, holdfast.rewards.work
print(sorted({"torch", "numpy", "transformers", "pydantic", "tenacity", "asyncio"} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == "[]\n"


def test_a_pool_starts_and_closes_twice(start: Start) -> None:
    pool = start("def reward(completion): return 1")
    pool.start()
    pool.close()
    pool.close()

    pool.start()

    assert pool.score(samples("a"))[0].reward == 1.0


def test_a_message_is_awaited_on_a_descriptor_of_any_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine allows no descriptor above 1,199")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1100)
    try:
        framing.write(writer, b"scored")
        assert framing.read_frame(high, time.monotonic() + 5) == b"scored"
        with pytest.raises(TimeoutError):
            framing.read_frame(high, time.monotonic() + 0.01)
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["pkg.rew:score", "own.py:score"])
def test_packages_of_the_current_directory_are_imported_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    configs = tmp_path / "configs"
    for folder in (tmp_path / "pkg", configs):
        folder.mkdir()
    (tmp_path / "pkg" / "rew.py").write_text("def score(completion):\n    return len(completion)\n")
    (tmp_path / "math.py").write_text("raise RuntimeError('imported in the place of the library')\n")
    (configs / "own.py").write_text("import math\nfrom pkg.rew import score\n")
    monkeypatch.chdir(tmp_path)

    with RewardPool([user(path)], RewardPoolConfig(workers=1), configs, tmp_path / "logs") as pool:
        assert [each.reward for each in pool.score(samples("abc"))] == [3.0]
