"""CPU threads of a rank: its share of the cores, where that computes faster than one thread.

The number of threads decides the order in which numbers are added up, so it is one of the optional forms: it is timed
at the start, recorded, and a resumed run uses the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from holdfast.config.sections.launch import LaunchConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.forms import BEGAN_SO, Candidate, Forms, Standing, timed_rounds
from holdfast.processor import usable_cores

_SIZE = 1024
"""Rows and columns of the matrices that are multiplied while threads are timed: about 0.03 s for one thread."""


def given_threads(launch: LaunchConfig, environ: Mapping[str, str]) -> int | None:
    """Return the threads that a key or OMP_NUM_THREADS names; None where the start chooses."""
    if launch.threads_per_rank != "auto":
        return launch.threads_per_rank
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    return int(first) if first.isdecimal() and int(first) else None


def choose_threads(
    forms: Forms, ranks: RankGroup, host: str, *, named: int | None, before: int | None = None
) -> Standing | None:
    """Choose the threads of each rank; all ranks call this together.

    Args:
        forms: Of the run's model.
        ranks: All of the run, which are timed together: they share cores.
        host: Name of this machine.
        named: Threads that a key or a variable names on this rank; they are used.
        before: Value that a record names, with which nothing is timed; None where there is no record.

    Returns:
        None where threads are named on some rank, or some rank has one core.
    """
    # A variable may be set on one machine alone.
    everyone = ranks.gather((named, host, usable_cores(), frozenset(os.sched_getaffinity(0))))
    if any(threads is not None for threads, *_ in everyone):
        if (most := max(threads or 1 for threads, *_ in everyone)) > 1:
            forms.note("threads", most)
        return None
    share = min(cores // sum(one[1:] == other[1:] for other in everyone) for one in everyone for cores in one[2:3])
    if share < 2:
        return None

    def use(threads: int) -> None:
        torch.set_num_threads(max(1, threads))

    if before == 0:
        use(0)
        return forms.note("threads", 0, BEGAN_SO)
    is_recorded = before is not None and before <= share
    value = before if before is not None and is_recorded else share
    candidate = Candidate(
        "threads",
        use,
        compare=str,  # every number of threads computes what one does, but for the order of sums
        rounds=lambda: _timed(share),
        value=value,
        is_timed=not is_recorded,
        takes=lambda threads: threads <= share,
    )
    return forms.choose(candidate)


def _timed(threads: int) -> list[tuple[float, float]]:
    """Return seconds of a feed-forward layer's work by so many threads and by one, in rounds."""
    generator = torch.Generator().manual_seed(0)
    rows, matrix = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))

    def work(count: int) -> None:
        torch.set_num_threads(count)
        torch.nn.functional.silu(rows @ matrix) @ matrix

    return timed_rounds(lambda: work(threads), lambda: work(1), torch.device("cpu"))
