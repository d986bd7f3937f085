"""Steps that all ranks of a run take alike, or fail alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from holdfast.config.verbs.training import TrainingConfig
from holdfast.parallel.collectives import ProcessExchange

T = TypeVar("T")


def open_exchange(config: TrainingConfig) -> ProcessExchange:
    """Return the ranks of a run as a group that exchanges objects."""
    return ProcessExchange(timedelta(minutes=config.launch.timeout_minutes))


def together(exchange: ProcessExchange, build: Callable[[], T]) -> T:
    """Run on every rank; if it fails on one, raise there and everywhere."""
    result: list[T] = []
    with exchange.together():
        result.append(build())
    return result[0]


def first_rank_first(exchange: ProcessExchange, build: Callable[[], T]) -> T:
    """Run on rank 0 before the others, so that downloads and caches are made once."""
    result: list[T] = []
    for turn in (True, False):
        with exchange.together():
            if (exchange.rank == 0) is turn:
                result.append(build())
    return result[0]
