"""The checkpoints of a running job: resume at the start, save, wait for saves, and handle saves that fail."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from holdfast import patience
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import TRAINED
from holdfast.checkpoint.keep.retention import wait_for_deletions
from holdfast.checkpoint.keep.retention_record import retention_of
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.storage import open_storage
from holdfast.checkpoint.session import Saved, Session
from holdfast.config.versions import versions
from holdfast.errors import UserError
from holdfast.parallel.collectives import RankGroup
from holdfast.training import directory
from holdfast.training.control import StopRequests
from holdfast.training.run import Training, say
from holdfast.training.saving.earlier_steps import go_on_from
from holdfast.training.saving.emergency import EmergencySave, StepState, collect_together, meet_again, wait_for_all
from holdfast.training.saving.exports import EXPORTS
from holdfast.training.saving.leases import RunLeases, check_seen
from holdfast.training.saving.parents import parent_of
from holdfast.training.saving.phases import start_from
from holdfast.training.saving.rehearsals import Rehearsals
from holdfast.training.saving.run_snapshot import Contents, checked_assets, fingerprints_of

_DELETION_SECONDS = 10.0
"""Longest wait of a run that has ended for the deletion of older checkpoints."""


class Checkpoints:
    """Owns a run's directory and its checkpoints within a block; all ranks enter it and call its methods together."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._config = training.run.config.checkpoint
        self._stack = ExitStack()
        self._storage = open_storage(directory.checkpoint_place(training.run.directory, training.run.config))
        self._ranks = RankGroup(self._config.timeout_minutes)
        self._session: Session | None = None
        self._leases = RunLeases(training.run.directory, self._storage, lambda message: say(training, message))
        self._deviations: tuple[str, ...] = ()
        self._failures = 0
        self._first_step = 0
        self._still_seconds = 60 * self._config.timeout_minutes

    def __enter__(self) -> Checkpoints:
        """Take the directory, and put the run where its newest verified checkpoint left it.

        Nothing is written before the rows of the first batch were read.

        Raises:
            UserError: The directory is taken, no checkpoint is whole, or the newest does not fit this run.
        """
        training = self._training
        if training.run.config.dry_run and training.run.world.is_first:
            directory.remove(training.run.directory)  # what an interrupted dry run left behind
        with training.run.ranks.together():
            has_checkpoints = self._leases.has_any() if training.run.world.is_first else False
            checked_assets(training)  # what cannot be written fails here, on all ranks alike
        has_checkpoints = self._ranks.agree(has_checkpoints)
        self._is_new_run = training.run.world.is_first and not self._leases.has_run()
        if not has_checkpoints:
            training.stream.read_ahead(training.model.state.step)
        try:
            run_id, has_checkpoints = training.run.ranks.on_first_rank(self._take_directory)
        except BaseException:
            self._stack.close()
            raise
        try:
            self._hold(run_id)
            check_seen(training, run_id, self._storage)
            self._start(has_checkpoints=has_checkpoints)
            # Now that nothing else can be refused.
            training.run.ranks.on_first_rank(lambda: self._leases.describe(training.run.config))
            self._emergency = EmergencySave(training, self._save_in_emergency, self._config.grace_seconds)
            self._stack.callback(self._emergency.close)
        except BaseException as error:
            self._leave_nothing(error)  # while nobody else can have taken it
            self._stack.close()
            raise
        return self

    def _hold(self, run_id: str) -> None:
        training = self._training
        self._session = Session(
            self._storage,
            self._ranks,
            run_id,
            retention_of(self._config.keep),
            background=self._config.background,
            read_back=self._config.read_back,
            reached=self._reached,
            late=training.run.world.failure.late_in_background,
            wait_for_all=self._wait_for_save,
        )
        self._contents = Contents(training)
        self._rehearsals = Rehearsals(training, self.session, self._contents)

    def _take_directory(self) -> tuple[str, bool]:
        """Take the lease; return the identity of the run that lives here, and whether it has checkpoints, or had."""
        training = self._training
        self._leases.take(self._stack)
        # The job that was waited for may have made this a run, and saved.
        self._is_new_run, has_checkpoints = not self._leases.has_run(), self._leases.has_any()
        lost = self._leases.lost_identity()
        if lost is not None or not directory.is_run(training.run.directory):
            directory.create(
                training.run.directory, training.run.config, training.run.config.verb, lost, parent_of(training)
            )
        return directory.run_id(training.run.directory), has_checkpoints

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save in flight, and give the directory back."""
        hangs = False
        try:
            if kind is None:
                self.collect()
                wait_for_deletions(_DELETION_SECONDS)
            elif issubclass(kind, Exception):
                # A save waits for all ranks: where one is lost, as long as a save before an error may take is enough.
                lost = error is not None and self._training.run.world.failure.broken_by_peer(error)
                hangs = not self._collect_before_leaving(self._config.grace_seconds if lost else self._still_seconds)
        finally:
            self._leave_nothing(error)  # while nobody else can have taken it
            self._stack.close()
            if self.session.status != "running" and not hangs:
                self._ranks.close()

    def _collect_before_leaving(self, still_seconds: float) -> bool:
        """Wait for the save in flight on this rank alone, as long as anything of it moves; return whether it ended.

        What became of it matters no more, but for a start that would not find it: the error that ends the run counts.

        Args:
            still_seconds: In which nothing of it moves.
        """
        session = self.session
        last_progress: tuple[str, int] | None = None
        deadline = time.monotonic() + still_seconds
        while session.status == "running":
            progress = (session.phase, session.storage.moved_bytes)
            if progress != last_progress:
                last_progress, deadline = progress, time.monotonic() + still_seconds
            if time.monotonic() > deadline:
                session.abandon()
                print(f"warning: the save in flight hangs in phase {session.phase!r} and is given up", flush=True)
                return False
            time.sleep(patience.current.save_look_seconds)
        with suppress(CheckpointError):
            saved = session.collect()
            if saved is not None:
                self._note(saved.manifest.step)
        return True

    def _note(self, step: int) -> None:
        """Record a save that the journal does not see, so that the next start can tell if it has disappeared."""
        if self._training.run.world.is_first:
            with suppress(OSError):
                directory.note_saved(self._training.run.directory, step)

    def _leave_nothing(self, error: BaseException | None) -> None:
        """Remove the directory of a new run that was refused before its first step."""
        training = self._training
        if isinstance(error, UserError) and self._is_new_run and training.model.state.step == self._first_step:
            self._leases.remove()

    @property
    def session(self) -> Session:
        """The saves of this run."""
        assert self._session is not None
        return self._session

    def _start(self, *, has_checkpoints: bool) -> None:
        training = self._training
        if not has_checkpoints:
            lost = training.run.ranks.on_first_rank(lambda: directory.last_saved(training.run.directory))
            if lost is not None:
                raise self._leases.gone(lost)
        source = (training, self._storage, self._ranks, self.session.run_id)
        restored, is_same_run = go_on_from(*source, has_checkpoints=has_checkpoints)
        if restored is not None:
            self._first_step = training.model.state.step
            if is_same_run:
                self.session.resumed = restored.manifest
            else:
                self._deviations = (f"a branch of run {restored.manifest.run_id} ({restored.manifest.hash})",)
            # Retention deletes the checkpoints that recorded them first.
            self._deviations = tuple(
                dict.fromkeys((*self._deviations, *restored.manifest.deviations, *restored.deviations))
            )
            state, total_steps = training.model.state, training.model.total_steps
            training.run.ranks.on_first_rank(lambda: self._leases.check_names_free(state.step, total_steps))
            if not training.finished:
                training.stream.read_ahead(training.model.state.step)
            return
        if self._config.init_from is not None:
            self._deviations = start_from(training, self._config.init_from, self._ranks)

    def rehearse(self, requests: StopRequests) -> None:
        """Save, verify and load once before anything is trained (`training/saving/rehearsals.py`).

        Raises:
            RehearsalFailed: A checkpoint could not be made; nothing was trained.
        """
        self._rehearsals.before_first_step(requests)

    def check_first_step(self, requests: StopRequests) -> list[Saved]:
        """Rehearse again after the first step, if the tensors changed.

        Returns:
            The save that this had to wait for.

        Raises:
            RehearsalFailed: As `rehearse`.
        """
        return self._rehearsals.after_step(requests, self.collect)

    @property
    def export_command(self) -> str | None:
        """The command that makes a model of the newest checkpoint; None if there is no checkpoint."""
        newest = self.session.newest
        if newest is None:
            return None
        is_partial = TRAINED in newest.contents and self._training.model.blueprint.directory is None
        name, options = step_name(newest.step), ["--adapter"] if is_partial else []
        options += ["--trust-remote-code"] if self._training.run.config.model.trust_remote_code else []
        output = self._training.run.directory / EXPORTS / name
        return shlex.join(
            ["holdfast", "checkpoint", "export", f"{self._storage.root}/{name}", *options, "-o", str(output)]
        )

    @property
    def is_new(self) -> bool:
        """Whether the run stands at a step that has no checkpoint yet."""
        newest = self.session.newest
        return newest is None or newest.step != self._training.model.state.step

    def save(self, metrics: Mapping[str, float]) -> list[Saved]:
        """Save the run as it stands; return what was committed meanwhile: the save before, as a rule.

        Args:
            metrics: Of this step.

        Raises:
            CheckpointError: The save before failed, and so did too many before it.
        """
        before = self.collect()
        if self.is_new:
            self._begin(metrics, wait=False)
        return before

    def save_last(self, metrics: Mapping[str, float]) -> list[Saved]:
        """Save the run as it stands, and return when that is on disk; return what was committed meanwhile.

        A save that fails is tried again, as often as `checkpoint.max_failures` allows: no later one makes up for it.

        Args:
            metrics: Of this step.

        Raises:
            CheckpointError: The save failed more often than `checkpoint.max_failures` allows.
        """
        saved = self.collect()
        while self.is_new:
            self._begin(metrics, wait=True)
            saved += self.collect("It is tried again")
        return saved

    def _begin(self, metrics: Mapping[str, float], *, wait: bool) -> None:
        training = self._training
        with training.run.phase("save"):
            self._check_place()
            training.model.state.observers = training.run.ranks.agree(
                training.model.state.observers
            )  # only rank 0 asks them
            plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            snapshot = self._contents.snapshot(StepState.now(training), training.run.ranks)
            self.session.save(snapshot, training.model.state.step, wait=wait, metrics=plain, **self._about())

    def _about(self) -> dict[str, Any]:
        training = self._training
        return {
            "mesh": {"replicate": training.model.plan.replicate, "shard": training.model.plan.shard},
            "versions": versions(),
            "fingerprints": fingerprints_of(training),
            "deviations": self._deviations,
        }

    def _check_place(self) -> None:
        """Make sure that the run's directory is still the same and still this run's.

        Raises:
            SaveFailed: The directory was replaced or taken; the same on all ranks.
        """
        self._training.run.ranks.on_all_ranks(self._leases.check)

    def _reached(self, phase: str) -> None:
        self._training.run.world.failure.in_background(phase)
        self._before_publishing(phase)

    def _before_publishing(self, phase: str) -> None:
        if phase == "publish":
            self._leases.check_now()

    def mark(self) -> None:
        """Note that the run stands between two steps."""
        self._emergency.mark()

    def count_again(self) -> None:
        """Note that numbers of the step that was marked were read since then."""
        self._emergency.count_again()

    def save_before_leaving(self) -> Manifest | None:
        """Save the last whole step if all ranks are about to fail.

        Returns:
            The checkpoint; None if there could be none.
        """
        return self._emergency.save()

    def _save_in_emergency(self, moment: StepState, ranks: RankGroup) -> Manifest | None:
        if not self._collect_before_leaving(self._still_seconds):
            return None  # it would hang where that one does
        newest = self.session.newest
        if moment.step == 0 or (newest is not None and newest.step == moment.step):
            return None
        ranks.on_all_ranks(self._leases.check)
        observers = ranks.agree(moment.state["observers"])
        snapshot = self._contents.snapshot(replace(moment, state={**moment.state, "observers": observers}), ranks)
        manifest = self.session.save_now(snapshot, moment.step, ranks, self._before_publishing, **self._about())
        self._note(manifest.step)
        return manifest

    def _wait_for_save(self) -> None:
        wait_for_all(self._training.run.ranks, self.session, self._config.timeout_minutes)

    def collect(self, consequence: str = "Training goes on") -> list[Saved]:
        """Wait for the save in flight, and return it; nothing if there was none.

        Args:
            consequence: What follows a failure that is allowed, in words.

        Raises:
            CheckpointError: It failed, and `checkpoint.max_failures` are used up; on all ranks.
        """
        there_is_one = self.session.status != "idle"
        try:
            with self._training.run.phase("save_wait") if there_is_one else nullcontext():
                self._wait_for_save()
                saved = collect_together(self._training, self.session)
        except CheckpointError as error:
            if not self._config.background:
                # A thread that was given up may still read what it was to save.
                self._training.model.host_offload.restore_for_good()
            self._ranks = meet_again(self._training, self.session)
            self._check_place()  # that it is gone is the reason of whatever went wrong
            self._failures += 1
            if self._failures > self._config.max_failures:
                raise
            remaining = self._config.max_failures - self._failures
            say(self._training, f"warning: {error} {consequence}; {remaining} more failures in a row are allowed.")
            return []
        if saved is None:
            return []
        self._failures = 0
        say(self._training, *(f"warning: {note}" for note in saved.notes))
        return [saved]

    def check_grace(self, requests: StopRequests) -> None:
        """Tell the user if the last save came later than promised."""
        if requests.asked_at is None:
            return
        seconds = time.monotonic() - requests.asked_at
        if seconds > self._config.grace_seconds:
            say(
                self._training,
                f"warning: the checkpoint was on disk {seconds:.0f} s after the signal, later than "
                f"checkpoint.grace_seconds={self._config.grace_seconds:g}",
            )
