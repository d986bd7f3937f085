"""Open what scores completions, for the length of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.config.grpo import GRPOConfig
from holdfast.parallel.mesh import World
from holdfast.rewards.here import RewardsHere
from holdfast.rewards.pool import RewardPool
from holdfast.training.build import Live, open_exchange, together
from holdfast.training.directory import run_directory
from holdfast.training.policy import Score

_MOST_WORKERS = 4


@contextmanager
def open_rewards(config: GRPOConfig, base: Path, world: World, live: Live | None = None) -> Iterator[Score]:
    """Start this rank's reward workers, and end them with the block; live rewards need none.

    Raises:
        ConfigError: A reward cannot work; the same on all ranks.
    """
    section = config.rewards
    if live is not None and live.rewards:
        exchange = open_exchange(config)
        functions = live.rewards
        here = together(exchange, lambda: RewardsHere(functions, config.reward, section))
        exchange.close()
        yield here.score
        return
    if section.workers == "auto":
        cores = len(os.sched_getaffinity(0)) // max(1, world.size)
        section = section.model_copy(update={"workers": min(_MOST_WORKERS, max(1, cores))})
    pool = RewardPool(config.reward, section, base, run_directory(config) / "logs")
    exchange = open_exchange(config)
    try:
        with exchange.together():
            pool.start()
        exchange.close()
        yield pool.score
    finally:
        pool.close()
