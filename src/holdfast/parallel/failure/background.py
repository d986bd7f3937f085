"""Which rank a thread beside the loop waited for in vain: a save's collectives are not those of training.

Each rank leaves a note of the phase its save is in. A rank that has stopped answering altogether is told from one whose
thread alone is late, because training can wait for the latter only.
"""

from __future__ import annotations

from holdfast.parallel.failure.heartbeat import Heartbeat, Whereabouts
from holdfast.parallel.failure.notes import Board

_GIVEN_UP = ", given up"


class BesideLoop:
    """One rank's notes, and a way to look at the others'.

    Args:
        rank: Own number.
        ranks: Of the run.
        board: Where notes are left.
        heartbeat: Of this rank's process.
    """

    def __init__(self, rank: int, ranks: int, board: Board, heartbeat: Heartbeat) -> None:
        self._rank, self._ranks = rank, ranks
        self._board, self._heartbeat = board, heartbeat

    @staticmethod
    def note(rank: int) -> str:
        """Return the name of a rank's note."""
        return f"background-rank-{rank}"

    def late(self) -> tuple[list[Whereabouts], str]:
        """Return the ranks that have stopped answering, and words about every rank that is late.

        Whoever waited leaves a phase `given_up`, so the one that was waited for is the one that has not. Takes a few
        seconds: silence is heard by waiting.
        """
        silent = self._heartbeat.silent()
        if silent:
            return silent, "; ".join(place.words() + self._save_of(place.rank) for place in silent)
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        awaited_ranks = [rank for rank in others if not self._phase_of(rank).endswith(_GIVEN_UP)]
        return [], "; ".join(f"rank {rank} is{self._save_of(rank).lstrip(',')}" for rank in awaited_ranks)

    def _phase_of(self, rank: int) -> str:
        return (self._board.read(self.note(rank)) or "").strip()

    def _save_of(self, rank: int) -> str:
        phase = self._phase_of(rank).removesuffix(_GIVEN_UP)
        return f", in phase {phase!r} of its save" if phase else ", in no save"


def given_up(phase: str) -> str:
    """Return the note of a rank that waits in a phase no longer."""
    return phase + _GIVEN_UP
