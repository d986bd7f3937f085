"""Where reward functions print, also before their run has a directory."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from holdfast.rewards.processes.pool import RewardPool
from holdfast.training.directory import LOGS, is_run
from holdfast.training.run import Setting


class RewardLog:
    """Owns the folder that the functions of one rank print into: the run's logs, or a hidden one until there are any.

    A run that is refused before its first step must leave nothing, so no run directory is made for a log. The hidden
    folder stands where the run directory will, or at the nearest folder above: a file into which functions print can
    be renamed, and only within its file system.
    """

    def __init__(self, setting: Setting) -> None:
        launched: Path | None = setting.world.failure.directory
        self._run = setting.directory.absolute()
        self._hidden: Path | None = None
        places = [place / LOGS for place in (self._run, launched) if place is not None]
        existing = next((place for place in places if place.is_dir()), None)
        if existing is None:
            existing = self._hidden = _hidden_folder(self._run)
        self.folder = existing

    def settle(self, pool: RewardPool | None) -> None:
        """Move the log into the run's as soon as there is a run directory; functions go on printing into it."""
        if pool is None or self._hidden is None or not is_run(self._run):
            return
        with suppress(OSError):  # another file system: it moves when nobody prints any more
            pool.move_log(self._logs())
            self._leave()

    def close(self, pool: RewardPool | None) -> None:
        """Leave the hidden folder, when the functions have ended; a log that a message names stays."""
        if self._hidden is None:
            return
        with suppress(OSError):  # a full disk: it stays where it is
            if pool is not None and pool.log_path.exists():
                if is_run(self._run):
                    shutil.move(pool.log_path, self._logs())
                elif pool.log_is_named:
                    return
            self._leave()

    def _logs(self) -> Path:
        logs = self._run / LOGS
        logs.mkdir(exist_ok=True)
        return logs

    def _leave(self) -> None:
        assert self._hidden is not None
        shutil.rmtree(self._hidden)
        self._hidden = None


def _hidden_folder(run_directory: Path) -> Path:
    above = next(path for path in run_directory.parents if path.is_dir())
    try:
        return Path(tempfile.mkdtemp(prefix=f".{run_directory.name}.rewards-", dir=above))
    except OSError:  # not writable: the run is about to say so
        return Path(tempfile.mkdtemp(prefix="holdfast-rewards-"))
