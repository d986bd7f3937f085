"""How much memory a piece of work takes, as the allocator counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def most_allocated(work: Callable[[], None]) -> int:
    """Return the most bytes that the CPU's allocator handed out at once, beyond what was out before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    result = profile.profiler.kineto_results
    memory = [(event.start_ns(), event.nbytes()) for event in result.events() if event.name() == "[memory]"]
    memory.sort(key=lambda event: event[0])
    return int(np.cumsum([count for _, count in memory]).max())
