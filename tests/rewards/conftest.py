"""Real pools over files of the test's own; nothing of them outlives a test."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.reward import Reward, RewardPoolConfig, UserRewardConfig
from holdfast.rewards.base import Sample
from holdfast.rewards.pool import RewardPool

Start = Callable[..., RewardPool]


def sample(completion: str = "text", sample_id: int = 0, /, **row: Any) -> Sample:
    return Sample(sample_id, "question", completion, [1, 2], list(range(len(completion))), "stop", row)


def samples(*completions: str, **row: Any) -> list[Sample]:
    return [sample(completion, place, **row) for place, completion in enumerate(completions)]


def user(path: str = "my.py:reward", **options: Any) -> UserRewardConfig:
    return UserRewardConfig(path=path, **options)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def started(place: Path) -> Iterator[Start]:
    """Give a function (source of my.py, rewards, options) -> started pool, and close what it started."""
    pools: list[RewardPool] = []

    def begin(source: str = "", *rewards: Reward, **options: Any) -> RewardPool:
        (place / "my.py").write_text(textwrap.dedent(source))
        config = RewardPoolConfig.model_validate({"workers": 2, "timeout_seconds": 20, **options})
        pools.append(RewardPool(rewards or [user()], config, place, place / "logs"))
        pools[-1].start()
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function (source of my.py, rewards, options) -> started pool."""
    with started(tmp_path) as begin:
        yield begin
