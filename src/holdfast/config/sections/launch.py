"""The `launch` section: how many ranks, and what happens when one dies."""

from __future__ import annotations

from typing import Literal

from holdfast.config.base import Count, Positive, PositiveInt, Section


class LaunchConfig(Section):
    """Ranks on this machine. Under torchrun, or wherever RANK and WORLD_SIZE are set, each process is one rank, and
    `ranks` and `max_restarts` are not read."""

    ranks: PositiveInt | Literal["auto"] = "auto"
    """Processes; `auto`: one per GPU, or one on a machine without."""
    threads_per_rank: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of each rank; `auto`: OMP_NUM_THREADS where that is set, else the rank's share of the cores that its
    process may use, if that multiplies faster at the start than one thread, else one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto`: on GPUs if there are any."""
    max_restarts: Count = 0
    """Times a run is started again after a rank died; two deaths at the same step end it."""
    min_ranks: PositiveInt | None = None
    """Fewest ranks, of all machines together, with which the run goes on from its newest verified checkpoint when
    others are lost. The next start has all ranks again; under Slurm a machine that comes back joins at once. null: the
    run ends, or starts again with all ranks (`max_restarts`, a requeued job)."""
    timeout_minutes: Positive = 30.0
    """Longest wait inside one collective."""

    @property
    def named_threads(self) -> int | None:
        """The threads that `threads_per_rank` names; None for `auto`."""
        return None if self.threads_per_rank == "auto" else self.threads_per_rank
