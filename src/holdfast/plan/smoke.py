"""Ranks that meet and do nothing else: `holdfast doctor` starts them as a run's are started."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import HoldfastError, UserError
from holdfast.launch.environment import resolve_ranks
from holdfast.launch.local import launch_local

TASK, OUTCOME = "task.json", "outcome.json"
_NUMBERS = 2**18
"""float32 numbers that are added over the ranks: 1 MiB."""


@dataclass(frozen=True)
class Task:
    """What the ranks do."""

    launch: Mapping[str, Any]
    place: str | None
    """A directory that all of them shall see."""

    def write(self, folder: Path) -> None:
        """Leave it for the ranks."""
        (folder / TASK).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Return what was written."""
        return cls(**json.loads((folder / TASK).read_text(encoding="utf-8")))


def meet(task: Task) -> dict[str, Any]:
    """Join the other ranks, add numbers, look for a word that rank 0 wrote; return the same on all ranks.

    Raises:
        UserError: The sum is wrong, or the ranks do not share the place.
    """
    import torch
    import torch.distributed as dist

    from holdfast.checkpoint.place.storage import LocalStorage
    from holdfast.checkpoint.save.rehearsal import check_shared
    from holdfast.parallel.collectives import RankGroup
    from holdfast.parallel.mesh import joined_world

    launch = LaunchConfig.model_validate(task.launch).model_copy(update={"timeout_minutes": 1.0})
    with joined_world(launch) as world:
        numbers = torch.full((_NUMBERS,), float(world.rank + 1), device=world.device)
        dist.all_reduce(numbers)  # the first one opens the connections
        expected = world.size * (world.size + 1) / 2
        if not bool((numbers == expected).all()):
            message = f"{world.size} ranks add up to {numbers[0].item():g} instead of {expected:g}."
            raise UserError(message)
        start = time.perf_counter()
        dist.all_reduce(numbers)
        numbers[0].item()
        milliseconds = 1000 * (time.perf_counter() - start)
        ranks = RankGroup(launch.timeout_minutes)
        if task.place is not None:
            check_shared(LocalStorage(Path(task.place)), ranks)
        hosts = len(set(ranks.gather(socket.gethostname())))
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        ranks.close()
        return {"ranks": world.size, "backend": backend, "hosts": hosts, "milliseconds": milliseconds}


def main(role: str, folder: Path) -> int:
    """Start the ranks, or be one of them; rank 0 leaves what came of it."""
    import os

    task = Task.read(folder)
    if role == "launch":
        launch = LaunchConfig.model_validate(task.launch).model_copy(update={"max_restarts": 0})
        command = [sys.executable, "-m", "holdfast.plan.smoke", "rank", str(folder)]
        return launch_local(command, resolve_ranks(launch), launch, folder / "run")
    try:
        outcome = meet(task)
    except HoldfastError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    temporary = folder / f"{OUTCOME}.{os.getpid()}"
    temporary.write_text(json.dumps(outcome), encoding="utf-8")
    temporary.replace(folder / OUTCOME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
