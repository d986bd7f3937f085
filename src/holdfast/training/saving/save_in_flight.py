"""The end of a save that went on beside the loop: ranks wait for it together, and it fails for one reason on all."""

from __future__ import annotations

import time

from holdfast.checkpoint.errors import CheckpointError, SaveFailed
from holdfast.checkpoint.session import LOST, Saved, Session
from holdfast.parallel.collectives import RankGroup
from holdfast.training.run import Run

_LOOK_SECONDS = 0.01
_SLACK_SECONDS = 30.0
"""A rank that noticed a time-out first leaves the others this long to notice theirs."""


def wait_for_all(ranks: RankGroup, session: Session, minutes: float, slack_seconds: float = _SLACK_SECONDS) -> None:
    """Wait until the save in flight has ended on every rank; one that hangs in it is named on all.

    A save may take as long as it needs, while some rank comes to another phase or moves bytes.

    Raises:
        SaveFailed: Nothing has moved on any rank until long after the others gave up.
    """
    patience_seconds = 60 * minutes + slack_seconds
    deadline = time.monotonic() + patience_seconds
    seen: dict[int, tuple[str, int]] = {}
    while True:
        progress = ranks.gather(
            (session.status, (session.phase, session.storage.moved_bytes), time.monotonic() > deadline)
        )
        waiting = {rank: place for rank, (status, place, _) in enumerate(progress) if status == "running"}
        if not waiting:
            return
        failed = any(status == "failed" for status, _, _ in progress)  # then nothing is saved, whatever still moves
        if not failed and any(seen.get(rank) != place for rank, place in waiting.items()):
            deadline = time.monotonic() + patience_seconds
        elif progress[0][2]:
            session.abandon()
            session.broken = LOST
            where = ", ".join(f"rank {rank} in phase {phase!r}" for rank, (phase, _) in waiting.items())
            raise SaveFailed(
                f"a save has hung for more than {minutes:g} minutes: {where}. Look at the file system of that rank."
            )
        seen = waiting
        time.sleep(_LOOK_SECONDS)


def collect_together(run: Run, session: Session) -> Saved | None:
    """Collect on all ranks; a save that failed on some, or for a reason of its own on each, failed for one on all.

    Raises:
        CheckpointError: The save failed on a rank; the same error on all ranks.
    """
    saved: Saved | None = None
    error: CheckpointError | None = None
    try:
        saved = session.collect()
    except CheckpointError as caught:
        error = caught
    run.setting.world.failure.in_background("")
    failure = None if error is None else (session.broken, str(error))
    failures = [words for words in run.setting.ranks.gather(failure) if words is not None]
    if not failures:
        return saved
    # Ranks that waited know more than those whose connections the waiting ones then closed.
    first = min(failures, key=lambda words: words[0] == LOST)[1]
    if error is not None and str(error) == first:
        raise error
    raise SaveFailed(first)


def meet_again(run: Run, session: Session) -> RankGroup:
    """Return the process group of the saves to come: a new one if a save lost a rank, as its connections are closed."""
    if any(run.setting.ranks.gather(session.broken)):
        session.ranks = RankGroup(run.setting.config.checkpoint.timeout_minutes)
        session.broken = ""
    return session.ranks
