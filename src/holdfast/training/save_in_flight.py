"""The end of a save that went on beside the loop: ranks wait for it together, and it fails for one reason on all."""

from __future__ import annotations

import time
from datetime import timedelta

from holdfast.checkpoint.errors import CheckpointError, SaveFailed
from holdfast.checkpoint.session import LOST, Saved, Session
from holdfast.parallel.collectives import ProcessExchange
from holdfast.training.run import Run

_LOOK_SECONDS = 0.01
_SLACK_SECONDS = 30.0
"""A rank that noticed a time-out first leaves the others this long to notice theirs."""


def wait_for_all(run: Run, session: Session) -> None:
    """Wait until the save in flight has ended on every rank; one that hangs in it is named on all.

    Raises:
        SaveFailed: It has not ended long after the others gave up.
    """
    minutes = run.config.checkpoint.timeout_minutes
    deadline = time.monotonic() + 60 * minutes + _SLACK_SECONDS
    while True:
        told = run.exchange.gather((session.status, session.phase, time.monotonic() > deadline))
        waiting = [rank for rank, (status, _, _) in enumerate(told) if status == "running"]
        if not waiting:
            return
        if told[0][2]:
            session.abandon()
            session.broken = LOST
            where = ", ".join(f"rank {rank} in phase {told[rank][1]!r}" for rank in waiting)
            raise SaveFailed(
                f"a save has hung for more than {minutes:g} minutes: {where}. Look at the file system of that rank."
            )
        time.sleep(_LOOK_SECONDS)


def collect_together(run: Run, session: Session) -> Saved | None:
    """Collect on all ranks; a save that failed on some, or for a reason of its own on each, failed for one on all.

    Raises:
        CheckpointError: The same on all ranks.
    """
    saved: Saved | None = None
    error: CheckpointError | None = None
    try:
        saved = session.collect()
    except CheckpointError as caught:
        error = caught
    run.world.failure.in_background("")
    failure = None if error is None else (session.broken, str(error))
    told = [words for words in run.exchange.gather(failure) if words is not None]
    if not told:
        return saved
    # Ranks that waited know more than those whose connections the waiting ones then closed.
    first = min(told, key=lambda words: words[0] == LOST)[1]
    if error is not None and str(error) == first:
        raise error
    raise SaveFailed(first)


def meet_again(run: Run, session: Session) -> ProcessExchange:
    """Return the process group of the saves to come: a new one if a save lost a rank, as its connections are closed."""
    if any(run.exchange.gather(session.broken)):
        session.ranks = ProcessExchange(timedelta(minutes=run.config.checkpoint.timeout_minutes))
        session.broken = ""
    return session.ranks
