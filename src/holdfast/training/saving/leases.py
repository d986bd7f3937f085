"""What a run holds while it goes on: its directory, and the place of its checkpoints where that is another one.

Two runs of other names may have one `checkpoint.storage`; each would clear away what the other is writing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path

from holdfast import patience
from holdfast.checkpoint.errors import NoCheckpoint
from holdfast.checkpoint.export.write import clean_exports
from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.format.other_systems import foreign_checkpoints
from holdfast.checkpoint.keep.retention import all_steps, changing, has_any, has_own, manifests, remove_leftovers
from holdfast.checkpoint.place.layout import lease_turns, step_of
from holdfast.checkpoint.place.lease import Lease, Told
from holdfast.checkpoint.place.storage import LocalStorage, Storage
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.files import is_there
from holdfast.training import directory
from holdfast.training.run import Training, say
from holdfast.training.saving.exports import EXPORTS


class RunLeases:
    """The leases of a run, which its first rank takes.

    Args:
        run_directory: Of the run.
        storage: Where its checkpoints are.
        announce: Told in a line that a job of another host is waited for, which may be dead.
    """

    def __init__(self, run_directory: Path, storage: Storage, announce: Told) -> None:
        self._directory = run_directory
        self._storage = storage
        self._announce = announce
        self._leases: list[Lease] = []
        self._made: list[Path] = []

    def has_any(self) -> bool:
        """Return whether there are checkpoints, or were.

        Raises:
            ConfigError: The place does not answer, or another system keeps its checkpoints there.
        """
        try:
            has_checkpoints = has_any(self._storage)
            foreign = None if has_own(self._storage) else foreign_checkpoints(self._storage)
        except OSError as error:
            raise ConfigError(
                f"{self._storage.root}, where this run's checkpoints are, cannot be read: {error.strerror or error}. "
                "Nothing was changed. Mend its address, permissions or credentials, or choose another run.dir or "
                "checkpoint.storage."
            ) from error
        if foreign is not None:
            raise ConfigError(
                f"{self._storage.root}, where this run's checkpoints would be, holds checkpoints that Holdfast did not "
                f"write: {foreign} Nothing was changed. Give the run a place of its own: another checkpoint.storage, "
                "run.dir or run.name."
            )
        return has_checkpoints

    def check_names_free(self, done: int, last: int | None) -> None:
        """Refuse what lies under the name of a step that is still to be saved, and is no checkpoint.

        Args:
            done: Steps that were made.
            last: Step at which the run ends; None where nobody knows.

        Raises:
            ConfigError: A save would find its name taken.
        """
        for name in all_steps(self._storage):
            step = step_of(name) or 0
            if done < step and (last is None or step <= last) and not self._storage.exists(f"{name}/{NAME}"):
                raise ConfigError(
                    f"{self._storage.root}/{name} is no checkpoint: it has no {NAME}, so Holdfast did not write it, or "
                    f"it was copied in part. It is left as it is, and a save of step {step} would find its name taken. "
                    "Move it to another place, or finish the copy, then start the same command again."
                )

    def gone(self, step: int) -> NoCheckpoint:
        """Return the error of a run that saved a step, and whose checkpoints are not where they were."""
        return NoCheckpoint(
            f"{self._directory} saved a checkpoint of step {step}, and {self._storage.root} holds none: it was moved "
            "or deleted, or is not mounted. Put it back, set checkpoint.storage to where it is, or choose another "
            "run.name to start again from step 0."
        )

    def has_run(self) -> bool:
        """Return whether the run's directory holds a run, or checkpoints of one."""
        default_storage = LocalStorage(self._directory / directory.CHECKPOINTS)
        return directory.is_run(self._directory) or has_any(default_storage)

    def lost_identity(self) -> str | None:
        """Return which run the checkpoints in the run's directory say they are of, where run.json holds nothing."""
        if not directory.is_blank(self._directory):
            return None
        default_storage = LocalStorage(self._directory / directory.CHECKPOINTS)
        run_ids = {
            manifest.run_id for storage in (default_storage, self._storage) for manifest in manifests(storage).values()
        }
        return run_ids.pop() if len(run_ids) == 1 else None

    def take(self, stack: ExitStack) -> None:
        """Take the leases of the run directory and of the checkpoint storage; closing the stack releases them.

        Raises:
            DirectoryTaken: Another job holds one of them; this one left nothing.
            ConfigError: The run's directory or the place of the checkpoints cannot be written.
        """
        is_new = not is_there(self._directory)
        with directory.refusing(self._directory):
            own = LocalStorage(self._directory / directory.CHECKPOINTS)
            self._leases = [stack.enter_context(Lease(own, notify=self._announce))]
        try:
            self._take_storage(stack)
        except BaseException:
            self._leave_storage()
            if is_new:
                directory.remove(self._directory)
            raise

    def _take_storage(self, stack: ExitStack) -> None:
        root = Path(self._storage.root)
        try:
            if root.exists() and root.samefile(self._directory / directory.CHECKPOINTS):
                return
            if isinstance(self._storage, LocalStorage):
                self._made = [folder for folder in (root, *root.parents) if not folder.exists()]
            self._leases.append(stack.enter_context(Lease(self._storage, notify=self._announce)))
        except OSError as error:
            raise ConfigError(
                f"checkpoint.storage={self._storage.root} cannot be written: {error.strerror or error}. Name a place "
                "that this user can write to, or mend its permissions."
            ) from error

    def describe(self, config: TrainingConfig) -> None:
        """Describe the run in its directory, and remove what earlier starts left half written.

        Raises:
            ConfigError: The directory does not take it.
        """
        with directory.refusing(self._directory):
            directory.create(self._directory, config, config.verb)
            clean_exports(self._directory / EXPORTS)
        with changing(self._storage):
            remove_leftovers(self._storage)

    def check(self) -> None:
        """Refuse to go on where one of them is another directory, or another job's, by now.

        Raises:
            SaveFailed: It was moved, deleted or replaced, or another job has taken over.
        """
        with suppress(OSError):  # where nobody answers, the save that follows says so
            self.check_now()

    def check_now(self) -> None:
        """Check the leases as `check` does, and raise if a directory does not answer.

        Raises:
            SaveFailed: As `check`.
            OSError: Nobody answers.
        """
        for lease in self._leases:
            lease.check()

    def remove(self) -> None:
        """Leave nothing of a new run that was refused: not the directory, nor an empty place for its checkpoints."""
        directory.remove(self._directory)
        self._leave_storage()

    def _leave_storage(self) -> None:
        with suppress(OSError):  # something is in it, and then it stays
            for folder in self._made:
                names = [entry.name for entry in folder.iterdir()]
                if folder == self._made[0] and len(names) == 1 and lease_turns(names):
                    (folder / names[0]).unlink()
                folder.rmdir()


def check_seen(training: Training, run_id: str, storage: Storage) -> None:
    """Look from every rank for what rank 0 has written; all ranks call this together.

    Where checkpoints lie elsewhere, a machine may have a directory of its own: its logs are in it.

    Args:
        training: The run.
        run_id: As rank 0 wrote it down.
        storage: Of checkpoints.

    Raises:
        ConfigError: A rank does not see the directory, and checkpoints would lie in it.
    """
    run = training.run
    if run.world.size == 1:
        return
    run_directory = run.directory
    answers = run.ranks.gather((run.world.host, _sees(run_directory, run_id)))
    blind = [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(answers) if not sees]
    if not blind:
        return
    names = ", ".join(blind[:4]) + (f" and {len(blind) - 4} more" if len(blind) > 4 else "")
    if isinstance(storage, LocalStorage) and Path(storage.root).absolute().is_relative_to(run_directory.absolute()):
        raise ConfigError(
            f"{run_directory} is not one directory for all ranks: what rank 0 on {answers[0][0]} wrote is not there "
            f"for {names}. Set run.dir to a shared file system, or checkpoint.storage to an object store."
        )
    say(
        training,
        f"note: {run_directory} is not shared: {names} write logs into a directory of the same name on their machine",
    )


def _sees(run_directory: Path, run_id: str) -> bool:
    """Return whether this rank reads what rank 0 wrote; a network file system may take a moment to show it."""
    deadline = time.monotonic() + patience.current.file_retries_seconds[-1]
    while True:
        try:
            if directory.run_id(run_directory) == run_id:
                return True
        except (OSError, ConfigError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(patience.current.file_retries_seconds[0] / 10)
