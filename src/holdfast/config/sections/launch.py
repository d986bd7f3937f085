"""The `launch` section: how many ranks, and what happens when one dies."""

from __future__ import annotations

from typing import Literal

from holdfast.config.base import Count, Positive, PositiveInt, Section


class LaunchConfig(Section):
    """Ranks on this machine. Under torchrun, or wherever RANK and WORLD_SIZE are set, each process is one rank, and
    `ranks` and `max_restarts` are not read."""

    ranks: PositiveInt | Literal["auto"] = "auto"
    """Processes; `auto`: one per GPU, or one on a machine without."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each rank; more than one is slower when ranks share cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto`: on GPUs if there are any."""
    max_restarts: Count = 0
    """Times a run is started again after a rank died; two deaths at the same step end it."""
    min_ranks: PositiveInt | None = None
    """On several machines under Slurm: ranks, of all machines together, with which the run goes on from its newest
    verified checkpoint when a machine is lost, until that comes back; null: the job ends and is queued again."""
    timeout_minutes: Positive = 30.0
    """Longest wait inside one collective."""
