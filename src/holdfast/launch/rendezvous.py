"""The file through which the ranks of one machine meet; unlike a TCP port, other users cannot write to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STORE_VARIABLE = "HOLDFAST_STORE"
"""Variable with the path of the file of `torch.distributed`'s store, set in every rank (parallel/rendezvous.py)."""


@contextmanager
def meeting_file(directory: Path) -> Iterator[Path]:
    """Yield the path of an empty file for the ranks of one attempt; the file is removed at the end of the block.

    On Linux it is an anonymous file in memory, whose only path is this process's descriptor under /proc, which only
    processes of the same user can open. No file system has to support locks, and nothing remains however the launcher
    ends.

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
