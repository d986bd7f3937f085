"""Who stopped: every rank says now and then that it lives and what it does, so that a wait that ends can name a rank.

A rank that was stopped, swapped out or cut off says nothing more. One that lives and is elsewhere (in an observer, in a
file system that does not answer) says where it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast import patience
from holdfast.parallel.failure.reports import Board

MISSED_BEATS = 3
"""Are silence."""


@dataclass(frozen=True)
class Whereabouts:
    """What a rank said last."""

    rank: int
    step: int | None
    phase: str
    silent: bool
    """It says nothing any more."""
    host: str = ""
    """Its machine; empty where all ranks share one."""
    left: bool = False
    """It said that it goes."""

    @property
    def name(self) -> str:
        """The rank and its machine."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    def place(self) -> str:
        """Return where it was in the run, with a space before it; empty if it never said."""
        where = f" in phase {self.phase!r}" if self.phase else ""
        return where + (f" at step {self.step}" if self.step is not None else "")

    def words(self) -> str:
        """Return a clause for an error."""
        if self.silent:
            return f"{self.name} has stopped answering{self.place()}"
        return f"{self.name} is{self.place() or ' somewhere else'}"


STORE_RANK = 0
"""On the machine of this rank lives the store: torchrun's, or that of the rank itself."""


@dataclass
class Sightings:
    """When each rank of a run was last heard of, as one rank knows it; filled by the thread that beats."""

    last_words: dict[int, Whereabouts] = field(default_factory=dict)
    """By rank, of the others."""
    _texts: dict[int, str | None] = field(default_factory=dict)
    _heard_at: dict[int, float] = field(default_factory=dict)
    store_at: float | None = None
    """When the store last answered; None before it did."""

    def take(self, texts: Mapping[int, str | None], places: Mapping[int, Whereabouts]) -> None:
        """Take what the store says now: the text of every other rank's beat, and what it means."""
        now = time.monotonic()
        for rank, text in texts.items():
            if text is not None and self._texts.get(rank) != text:
                self._texts[rank], self._heard_at[rank] = text, now
                self.last_words[rank] = places[rank]
        self.store_at = now

    def forgive(self, seconds: float) -> None:
        """Take time off everybody's silence in which this process itself did not run."""
        self._heard_at = {rank: at + seconds for rank, at in self._heard_at.items()}
        self.store_at = None if self.store_at is None else self.store_at + seconds

    def store_silent_for(self, now: float) -> float:
        """Return the seconds since the store answered."""
        return 0.0 if self.store_at is None else now - self.store_at

    def silent_for(self, now: float) -> dict[int, float]:
        """Return the seconds since each other rank was heard of; a rank that has left is not in it."""
        store_silence = self.store_silent_for(now)
        seconds = {}
        for rank, at in self._heard_at.items():
            if not self.last_words[rank].left:
                # While the store does not answer nobody is heard: that says nothing of them.
                seconds[rank] = max(0.0, now - at - store_silence)
        if store_silence and STORE_RANK in seconds:
            host = self.last_words[STORE_RANK].host
            there = [rank for rank in seconds if self.last_words[rank].host == host]
            seconds |= {rank: max(seconds[rank], store_silence) for rank in there}
        return seconds


class Heartbeat:
    """One rank's beats, and a way to look at the others'.

    Args:
        rank: Own number.
        ranks: Of the run.
        board: Where beats are left.
        now: Returns (step, phase) of this rank.
        host: Its machine, where ranks are on several; every beat then also listens to the others'.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        board: Board,
        now: Callable[[], tuple[int | None, str]],
        host: str = "",
    ) -> None:
        self._rank, self._ranks, self._host = rank, ranks, host
        self._board, self._now = board, now
        self.sightings = Sightings()
        """Of the other ranks, where they are on several machines."""
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
        self._board.write(f"beat-rank-{self._rank}", "0|||")

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(patience.current.beat_seconds if count else 0):
            count += 1
            step, phase = self._now()
            beat = f"{count}|{'' if step is None else step}|{self._host}|{phase}"
            self._board.write(f"beat-rank-{self._rank}", beat)
            if self._host:
                self._listen()

    def _listen(self) -> None:
        others = self._others()
        texts = self._board.read_all([f"beat-rank-{rank}" for rank in others])
        if texts is not None:
            beats = dict(zip(others, texts, strict=True))
            self.sightings.take(beats, {rank: _parse(rank, text, silent=False) for rank, text in beats.items()})

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
        time.sleep(patience.current.beat_seconds * MISSED_BEATS)
        after = {rank: self._read(rank) for rank in before}
        return [_parse(rank, after[rank], silent=True) for rank in before if after[rank] == before[rank]]


def _parse(rank: int, text: str | None, *, silent: bool) -> Whereabouts:
    if text is None:
        return Whereabouts(rank, None, "", silent)
    count, step, host, phase = text.split("|", 3)
    return Whereabouts(rank, int(step) if step else None, phase, silent, host, left=count == "0")
