"""Save the last whole step when all ranks raise, and wait for saves in flight.

A rank that raises alone leaves the others in collectives that nothing can interrupt, and a save needs the shards of
all; then the newest checkpoint counts.

A save that went on beside the loop ends on all ranks together, and fails for one reason on all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast import patience
from holdfast.checkpoint.errors import CheckpointError, SaveFailed
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import RandomState, random_state
from holdfast.checkpoint.session import LOST_A_RANK, Saved, Session
from holdfast.parallel.collectives import RankGroup
from holdfast.training.run import Training

_SAVE_SLACK_SECONDS = 30.0
"""A rank that noticed a save's time-out first leaves the others this long to notice theirs."""


@dataclass(frozen=True)
class StepState:
    """The state of a finished step on this rank, without its tensors."""

    step: int
    state: Mapping[str, Any]
    stream: Mapping[str, Any]
    random: RandomState
    ahead: Callable[[], list[dict[str, Any]]] | None = None
    """Tells what this rank has of the next step; None where nothing is made ahead."""

    @classmethod
    def now(cls, training: Training) -> StepState:
        """Describe the run as it stands between two steps."""
        ahead = None if training.ahead is None else training.ahead.finished()
        return cls(
            training.model.state.step, training.model.state.as_plain(), training.stream.state(), random_state(), ahead
        )

    def shared(self, ranks: RankGroup) -> dict[str, Any]:
        """Return what is the same on all ranks; all of them call this together."""
        shared = {"state": dict(self.state), "stream": dict(self.stream)}
        if self.ahead is None:
            return shared
        return shared | {
            "ahead": [completion for completions in ranks.gather(self.ahead()) for completion in completions]
        }


Write = Callable[[StepState, RankGroup], Manifest | None]
"""Commits a moment; every rank calls it. None if that step is on disk already."""


class EmergencySave:
    """Saves the last whole step of a run that all ranks are about to leave with an error.

    Args:
        training: The run.
        write: Makes the checkpoint.
        grace_seconds: Longest time a rank waits for another one within the save.
    """

    def __init__(self, training: Training, write: Write, grace_seconds: float) -> None:
        self._training = training
        self._write = write
        self._ranks = RankGroup(grace_seconds / 60)  # collectives of training may be broken off
        self._name = training.run.ranks.agree(uuid.uuid4().hex[:8])
        self._moment = StepState.now(training)

    def close(self) -> None:
        """Close the connections of the save."""
        self._ranks.close()

    def mark(self) -> None:
        """Note that the run stands between two steps."""
        self._moment = StepState.now(self._training)

    def count_again(self) -> None:
        """Take over the counters of skipped updates: the last update's numbers were read since the step was marked."""
        state = self._training.model.state
        counted = {"skipped_steps": state.skipped_steps, "skipped_in_a_row": state.skipped_in_a_row}
        if state.step == self._moment.step:
            self._moment = replace(self._moment, state={**self._moment.state, **counted})

    def save(self) -> Manifest | None:
        """Save the last whole step together with all other ranks, which raise as well.

        Returns:
            The manifest; None if a rank does not raise, ranks stand at different steps, or the step is on disk already.
        """
        if not self._training.run.world.failure.all_ranks_raise(self._name):
            return None
        try:
            moment = self._whole_moment()
            steps = self._ranks.gather(None if moment is None else moment.step)
            return None if moment is None or set(steps) != {moment.step} else self._write(moment, self._ranks)
        except Exception as error:  # noqa: BLE001 - the error that is being raised counts, not this one
            print(f"the last whole step could not be saved before the error: {error}", flush=True)
            return None

    def _whole_moment(self) -> StepState | None:
        training = self._training
        if not training.is_whole:
            return None  # an update that was broken off leaves some tensors new and some old
        return self._moment if training.model.state.step == self._moment.step else StepState.now(training)


def wait_for_all(ranks: RankGroup, session: Session, minutes: float, slack_seconds: float | None = None) -> None:
    """Wait until the save in flight has ended on every rank; one that hangs in it is named on all.

    A save may take as long as it needs, while some rank comes to another phase or moves bytes.

    Raises:
        SaveFailed: Nothing has moved on any rank until long after the others gave up.
    """
    slack_seconds = _SAVE_SLACK_SECONDS if slack_seconds is None else slack_seconds
    longest_seconds = 60 * minutes + slack_seconds
    deadline = time.monotonic() + longest_seconds
    last_progress: dict[int, tuple[str, int]] = {}
    while True:
        progress = ranks.gather(
            (session.status, (session.phase, session.storage.moved_bytes), time.monotonic() > deadline)
        )
        waiting = {rank: position for rank, (status, position, _) in enumerate(progress) if status == "running"}
        if not waiting:
            return
        failed = any(status == "failed" for status, _, _ in progress)  # then nothing is saved, whatever still moves
        if not failed and any(last_progress.get(rank) != position for rank, position in waiting.items()):
            deadline = time.monotonic() + longest_seconds
        elif progress[0][2]:
            session.abandon()
            session.broken = LOST_A_RANK
            hanging = ", ".join(f"rank {rank} in phase {phase!r}" for rank, (phase, _) in waiting.items())
            raise SaveFailed(
                f"a save has hung for more than {minutes:g} minutes: {hanging}. Look at the file system of that rank."
            )
        last_progress = waiting
        time.sleep(patience.current.save_look_seconds)


def collect_together(training: Training, session: Session) -> Saved | None:
    """Collect the save on all ranks; if it failed on any rank, raise the same error on all of them.

    Raises:
        CheckpointError: The save failed on a rank; the same error on all ranks.
    """
    saved: Saved | None = None
    error: CheckpointError | None = None
    try:
        saved = session.collect()
    except CheckpointError as caught:
        error = caught
    training.run.world.failure.in_background("")
    failure = None if error is None else (session.broken, str(error))
    failures = [reported for reported in training.run.ranks.gather(failure) if reported is not None]
    if not failures:
        return saved
    # Ranks that waited know more than those whose connections the waiting ones then closed.
    first = min(failures, key=lambda reported: reported[0] == LOST_A_RANK)[1]
    if error is not None and str(error) == first:
        raise error
    raise SaveFailed(first)


def meet_again(training: Training, session: Session) -> RankGroup:
    """Return the process group of the saves to come: a new one if a save lost a rank, as its connections are closed."""
    if any(training.run.ranks.gather(session.broken)):
        session.ranks = RankGroup(training.run.config.checkpoint.timeout_minutes)
        session.broken = ""
    return session.ranks
