"""Whether all machines see the run's directory: said before step 1, and refused where checkpoints would lie in it."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast import patience
from holdfast.checkpoint.place.storage import Storage
from holdfast.errors import ConfigError
from holdfast.training import directory
from holdfast.training.run import Run, say


def check_seen(run: Run, run_id: str, storage: Storage) -> None:
    """Look from every rank for what rank 0 has written; all ranks call this together.

    Where checkpoints lie elsewhere, a machine may have a directory of its own: its logs are in it.

    Args:
        run: The run.
        run_id: As rank 0 wrote it down.
        storage: Of checkpoints.

    Raises:
        ConfigError: A rank does not see the directory, and checkpoints would lie in it.
    """
    setting = run.setting
    if setting.world.size == 1:
        return
    place = setting.directory
    answers = setting.ranks.gather((setting.world.host, _sees(place, run_id)))
    blind = [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(answers) if not sees]
    if not blind:
        return
    names = ", ".join(blind[:4]) + (f" and {len(blind) - 4} more" if len(blind) > 4 else "")
    if storage.renames and Path(storage.root).absolute().is_relative_to(place.absolute()):
        raise ConfigError(
            f"{place} is not one directory for all ranks: what rank 0 on {answers[0][0]} wrote is not there for "
            f"{names}. Set run.dir to a shared file system, or checkpoint.storage to an object store."
        )
    say(run, f"note: {place} is not shared: {names} write logs into a directory of the same name on their machine")


def _sees(place: Path, run_id: str) -> bool:
    """Return whether this rank reads what rank 0 wrote; a network file system may take a moment to show it."""
    deadline = time.monotonic() + patience.current.file_retries_seconds[-1]
    while True:
        try:
            if directory.run_id(place) == run_id:
                return True
        except (OSError, ConfigError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(patience.current.file_retries_seconds[0] / 10)
