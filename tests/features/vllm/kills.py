"""Runs that are killed while servers answer them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.features.vllm.served import ServedModel


def is_killed(command: Sequence[str], directory: Path, served: ServedModel, events: int) -> bool:
    """Start a run and kill it after so many further events of its server; return False where it ended before.

    Args:
        command: Of the run, in this directory, where its output goes to `log`.
        directory: As above.
        served: What its server computes.
        events: Further ones.
    """
    until = len(served.events) + events
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        while process.poll() is None and len(served.events) < until:
            time.sleep(0.005)
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
    return True
