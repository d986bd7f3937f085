"""Who stopped: every rank says now and then that it lives and what it does, so that a wait that ends can name a rank.

A rank that was stopped, swapped out or cut off says nothing more. One that lives and is elsewhere (in an observer, in a
file system that does not answer) says where it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast import patience
from holdfast.parallel.failure.reports import Board

_MISSED_BEATS = 3


@dataclass(frozen=True)
class Whereabouts:
    """What a rank said last."""

    rank: int
    step: int | None
    phase: str
    silent: bool
    """It says nothing any more."""

    def words(self) -> str:
        """Return a clause for an error."""
        where = f" in phase {self.phase!r}" if self.phase else ""
        where += f" at step {self.step}" if self.step is not None else ""
        if self.silent:
            return f"rank {self.rank} has stopped answering{where}"
        return f"rank {self.rank} is{where or ' somewhere else'}"


class Heartbeat:
    """One rank's beats, and a way to look at the others'.

    Args:
        rank: Own number.
        ranks: Of the run.
        board: Where beats are left.
        now: Returns (step, phase) of this rank.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        board: Board,
        now: Callable[[], tuple[int | None, str]],
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._board, self._now = board, now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="holdfast-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def leave(self) -> None:
        """Say that this rank is nowhere any more; after `stop`."""
        self._board.write(f"beat-rank-{self._rank}", "0||")

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(patience.current.beat_seconds if count else 0):
            count += 1
            step, phase = self._now()
            self._board.write(f"beat-rank-{self._rank}", f"{count}|{'' if step is None else step}|{phase}")

    def _read(self, rank: int) -> str | None:
        return self._board.read(f"beat-rank-{rank}")

    def missing(self) -> list[Whereabouts]:
        """Return the ranks that are not where this one is: silent ones, else those in another phase or step.

        Takes a few seconds: silence is heard by waiting.
        """
        silent = self._silent()
        if silent:
            return silent
        places = [_parse(rank, self._read(rank), silent=False) for rank in self._others()]
        return [place for place in places if (place.step, place.phase) != self._now()]

    def silent(self) -> list[Whereabouts]:
        """Return the ranks that have stopped answering; none where nobody beats. Takes a few seconds."""
        places = self._silent()
        return places if self._thread.ident is not None else []

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def _silent(self) -> list[Whereabouts]:
        before = {rank: self._read(rank) for rank in self._others()}
        time.sleep(patience.current.beat_seconds * _MISSED_BEATS)
        after = {rank: self._read(rank) for rank in before}
        return [_parse(rank, after[rank], silent=True) for rank in before if after[rank] == before[rank]]


def _parse(rank: int, text: str | None, *, silent: bool) -> Whereabouts:
    if text is None:
        return Whereabouts(rank, None, "", silent)
    _, step, phase = text.split("|", 2)
    return Whereabouts(rank, int(step) if step else None, phase, silent)
