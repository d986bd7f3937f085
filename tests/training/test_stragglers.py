"""Which rank the others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.metrics.health import STRAGGLER_STEPS
from holdfast.parallel.collectives import RankGroup
from holdfast.training.numbers import Stragglers, slowest


def work(world: Any, busy: int) -> list[dict[str, float]]:
    ranks = RankGroup()
    stragglers = Stragglers(ranks, "cpu")
    looks = []
    for step in range(1, 2 * STRAGGLER_STEPS + 1):
        end = time.process_time() + (0.03 if ranks.rank == busy else 0.002)
        while time.process_time() < end:
            pass
        ranks.gather(None)
        looks.append(stragglers.look(step))
    ranks.close()
    return looks


@pytest.mark.parametrize("busy", [0, 1])
def test_the_rank_that_works_longest_is_named_on_all(pools: Callable[[int], Any], busy: int) -> None:
    both = pools(2).run(work, busy)

    assert both[0] == both[1]
    (look,) = [look for look in both[0] if look]
    assert look["ranks/slowest"] == busy
    assert look["ranks/slowest_ratio"] > 2


def test_the_ratio_is_to_the_rank_in_the_middle() -> None:
    assert slowest([1.0, 4.0, 2.0]) == {"ranks/slowest": 1.0, "ranks/slowest_ratio": 2.0}
    assert slowest([1.0, None]) == {}
    assert slowest([0.0, 0.0]) == {}
