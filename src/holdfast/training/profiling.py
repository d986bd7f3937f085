"""Profile some steps with torch.profiler: a trace of every rank, and on CUDA a snapshot of the device's memory.

profile/rank-N.json.gz opens in ui.perfetto.dev or chrome://tracing; profile/rank-N.memory.pickle, on CUDA alone, at
pytorch.org/memory_viz. Profiling slows the steps it sees and changes no number.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.training.run import Run

PROFILE_FOLDER = "profile"
_MOST_ALLOCATIONS = 100_000


class StepProfiler:
    """Profiles the steps in `profile`; does nothing in a run without this key."""

    def __init__(self, run: Run) -> None:
        self._first, self._last = run.config.profile or (0, 0)
        self._run = run
        self._profile: profile | None = None
        self._cuda = run.world.device.type == "cuda"

    def before(self, step: int) -> None:
        """Start the profiler at the first step to profile, or if the run was resumed within these steps."""
        if self._profile is not None or not self._first <= step <= self._last:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._profile.start()

    def after(self, step: int) -> None:
        """End and write, if this was the last one."""
        if self._profile is not None and step >= self._last:
            self.close()

    def close(self) -> None:
        """Write what was seen; a disk that does not take it is told, and ends no run."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        folder, rank = self._run.directory / PROFILE_FOLDER, self._run.ranks.rank
        try:
            folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))
            if self._cuda:
                torch.cuda.memory._dump_snapshot(str(folder / f"rank-{rank}.memory.pickle"))  # type: ignore[no-untyped-call]  # torch's
                with suppress(RuntimeError):
                    torch.cuda.memory._record_memory_history(enabled=None)
            message = f"steps {self._first} to {self._last} are profiled in {folder}; open a trace in ui.perfetto.dev"
        except (OSError, RuntimeError) as error:
            message = f"warning: the profile could not be written: {error}"
        self._run.log.messages.append(message)
