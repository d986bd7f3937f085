"""CPU threads of a rank: its share of the cores, where that computes faster than one thread.

The number of threads decides the order in which numbers are added up, so it is one of the optional forms: it is timed
at the start, recorded, and a resumed run uses the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.config.sections.launch import LaunchConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.forms import Candidate, Forms, Standing, timed_rounds
from holdfast.parallel.processor import usable_cores

_SIZE = 1024
"""Rows and columns of the matrices that are multiplied while threads are timed: about 0.03 s for one thread."""


def given_threads(launch: LaunchConfig, environ: Mapping[str, str]) -> int | None:
    """Return the threads that a key or OMP_NUM_THREADS names; None where the start chooses."""
    if launch.threads_per_rank != "auto":
        return launch.threads_per_rank
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    return int(first) if first.isdecimal() and int(first) else None


def choose_threads(forms: Forms, ranks: RankGroup, local_ranks: int) -> Standing | None:
    """Choose the threads of each rank; all ranks call this together.

    Args:
        forms: Of the run's model.
        ranks: All of the run, which are timed together: they share cores.
        local_ranks: Ranks on this machine.

    Returns:
        None where some rank has one core.
    """
    share = min(ranks.gather(usable_cores() // local_ranks))
    if share < 2:
        return None
    candidate = Candidate(
        "threads",
        lambda threads: torch.set_num_threads(max(1, threads)),
        compare=str,  # every number of threads computes what one does, but for the order of sums
        rounds=lambda: _timed(share),
        value=share,
        detail=lambda: f": {share}",
        is_timed=True,
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
