"""The sequence of checkpoints of a running job: one save at a time, read back before older checkpoints are deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast import patience
from holdfast.checkpoint.background import BackgroundSaver, Status
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointError, NoCheckpoint, SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.snapshot import Snapshot
from holdfast.checkpoint.format.verification import verified_manifest
from holdfast.checkpoint.keep.retention import Retention, apply_retention, put_aside
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.storage import Storage
from holdfast.checkpoint.saving.agreement import together_in_phase
from holdfast.checkpoint.saving.writer import Reached, commit
from holdfast.errors import HoldfastError
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.classify import broken_by_peer, timed_out

WAITED, LOST_A_RANK = "waited until its time was over", "lost another rank"


@dataclass(frozen=True)
class Saved:
    """A save that was committed."""

    manifest: Manifest
    deleted: tuple[int, ...]
    """Steps that retention removed after it."""
    notes: tuple[str, ...] = ()
    """What went wrong without harm, such as a file that could not be deleted."""


@dataclass
class Session:
    """Saves checkpoints in order; each records the hash of its predecessor.

    Args:
        storage: Storage of the checkpoints.
        ranks: A process group that nothing else uses while a save is running.
        run_id: Identifier of the run.
        retention: Rule for which checkpoints are kept.
        background: Whether to copy the tensors, so that `save` returns while they are written.
        read_back: Whether to compare hashes of the files on disk before older checkpoints are deleted.
        reached: Called with the name of every phase of a save, and with "retention".
        late: Called with a phase; describes the ranks that a save waited for until its time-out.
        wait_for_all: Waits until the running save has ended on all ranks, or raises; default: wait for this rank only.
    """

    storage: Storage
    ranks: RankGroup
    run_id: str
    retention: Retention
    background: bool = True
    read_back: bool = True
    reached: Reached = lambda _: None
    late: Callable[[str], str] = lambda _: ""
    wait_for_all: Callable[[], object] | None = None
    resumed: Manifest | None = None
    """Manifest of the checkpoint that the run continued from."""
    phase: str = ""
    """Phase of the running save on this rank."""
    broken: str = ""
    """How a save lost another rank; the process group of saves cannot be used afterwards. Empty if none has."""
    _attempt: object = None
    """Identity of the running save; a thread whose save was given up holds another one and stops."""
    _parent: Manifest | None = None
    _saver: BackgroundSaver[Saved] = field(default_factory=BackgroundSaver)

    @property
    def newest(self) -> Manifest | None:
        """The last checkpoint this session wrote, or continued from."""
        return self._parent or self.resumed

    @property
    def status(self) -> Status:
        """State of the running save on this rank; ranks compare theirs before they collect."""
        return self._saver.status

    def _about_of(self, step: int, about: Mapping[str, Any]) -> About:
        before = self.newest
        return About(
            run_id=self.run_id,
            step=step,
            parent=None if before is None else before.hash,
            parent_step=None if before is None else before.step,
            **about,
        )

    def save_now(self, snapshot: Snapshot, step: int, ranks: RankGroup, reached: Reached, **about: Any) -> Manifest:
        """Commit a checkpoint over another process group, and delete nothing: for ranks that are about to fail.

        Raises:
            SaveFailed: On all ranks.
        """
        return commit(snapshot, self.storage, self._about_of(step, about), ranks, reached=reached)

    def save(self, snapshot: Snapshot, step: int, *, wait: bool = False, **about: Any) -> None:
        """Write a checkpoint, or start writing it in the background; the previous save must have been collected.

        Args:
            snapshot: Snapshot of the live tensors.
            step: Step of the checkpoint, which names its directory.
            wait: Whether to return only once it is on disk, even where `background` is set.
            about: Further fields of `About`, such as the metrics of this step.
        """
        about_save = self._about_of(step, about)
        # On a thread also where training waits: a file system that hangs can then be given up, and be named.
        self._attempt = attempt = object()
        self._saver.start(snapshot, lambda staged: self._write(staged, about_save, attempt), copy=self.background)
        if wait or not self.background:
            (self.wait_for_all or self._wait)()

    def _wait(self) -> None:
        while self.status == "running":
            time.sleep(patience.current.session_look_seconds)

    def _write(self, snapshot: Snapshot, about: About, attempt: object) -> Saved:
        ranks = self.ranks  # a thread that was given up must not mix into the group of a later save
        try:
            return self._committed(snapshot, about, ranks, lambda phase: self._reach(phase, attempt))
        except Exception as error:
            if isinstance(error, HoldfastError) or not broken_by_peer(error):
                raise
            self.broken = WAITED if timed_out(error) else LOST_A_RANK
            # Only who waited knows who is late: a rank that died closes its connections, and is heard of elsewhere.
            late = self.late(self.phase) if self.broken == WAITED else "it ended, or waited no longer"
            late = late or "which one, is not known; look at network and disk"
            raise SaveFailed(
                f"rank {ranks.rank} {self.broken} in phase {self.phase!r} of the save of step {about.step}: {late}."
            ) from error

    def _committed(self, snapshot: Snapshot, about: About, ranks: RankGroup, reached: Reached) -> Saved:
        notes: list[str] = []
        manifest = commit(snapshot, self.storage, about, ranks, reached=reached, notify=notes.append)
        if self.read_back:
            reached("read back")
            self._verify(manifest, ranks)
        reached("retention")
        needed = {about.step} | ({self.resumed.step} if self.resumed is not None else set())
        deleted: list[int] = []
        if ranks.rank == 0:
            try:
                deleted = apply_retention(self.storage, self.retention, needed=needed, notify=notes.append)
            except Exception as error:  # noqa: BLE001 - the checkpoint is there, and the others wait for this rank
                notes.append(f"older checkpoints could not be deleted: {error}.")
        deleted, notes = ranks.agree((deleted, notes))
        return Saved(manifest, tuple(deleted), tuple(notes))

    def _reach(self, phase: str, attempt: object) -> None:
        if attempt is not self._attempt:  # its tensors may be of a later step by now, and its name somebody else's
            raise SaveFailed(f"this save was given up before its phase {phase!r}.")
        self.phase = phase
        self.reached(phase)

    def _verify(self, manifest: Manifest, ranks: RankGroup) -> None:
        name = step_name(manifest.step)
        try:
            verified_manifest(self.storage, name, ranks, from_disk=True)
        except (CheckpointError, NoCheckpoint) as error:
            damaged = isinstance(error, CheckpointCorrupt | NoCheckpoint)  # one that cannot be read may be whole
            with together_in_phase(ranks, "read back"):
                if damaged and ranks.rank == 0:
                    put_aside(self.storage, name)
            raise SaveFailed(f"step {manifest.step} was written and reads back differently: {error}") from error

    def abandon(self) -> None:
        """Give up the running save: a thread that hangs in a file system cannot be ended."""
        self._attempt = None
        self._saver.abandon()

    def collect(self) -> Saved | None:
        """Wait for the running save and return its result; None if no save was started.

        Raises:
            CheckpointError: The save failed; the same on all ranks, and earlier checkpoints are intact.
        """
        saved = self._saver.collect()
        if saved is not None:
            self._parent = saved.manifest
        return saved
