"""Where the ranks of one machine meet: a file that nobody else can open, and no port that anybody could write to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STORE_VARIABLE = "HOLDFAST_STORE"
"""Set in every rank: the path of the file in which `torch.distributed` keeps its store (parallel/rendezvous.py)."""


@contextmanager
def meeting_file(directory: Path) -> Iterator[Path]:
    """Yield an empty file for the ranks of one attempt; it is gone when the block ends.

    On Linux it lies in memory and has no name but this process's descriptor, which only processes of the same user can
    open: no file system has to lock it, and nothing of it stays behind however the launcher ends.

    Args:
        directory: The launch directory, which other users cannot enter.
    """
    if sys.platform != "linux":
        file = directory / "store"
        file.unlink(missing_ok=True)  # what an earlier attempt wrote would be taken for this one's
        yield file
        return
    descriptor = os.memfd_create("holdfast-store")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
