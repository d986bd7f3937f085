"""Heartbeats: each rank publishes its step and phase every second, so that a collective that times out can name a rank.

A rank that was stopped, swapped out or disconnected publishes nothing more. A rank that is alive but late (in an
observer, or in a file system that does not answer) publishes the phase that it is in.

Whole machines can vanish too. A single silent rank may be busy in native code that holds the interpreter lock, so it
is named and waited for. A machine all of whose ranks are silent was killed, stopped or disconnected: after
`patience.lost_host_seconds` it is given up, since collectives with it would block until their time-out. All times are
of this process's monotonic clock and are never compared with another machine's.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast import patience
from holdfast.parallel.failure.reports import LOST, Failure, NoteBoard, place

MISSED_BEATS = 3
"""A rank counts as silent after this many beats without a new one."""
STORE_RANK = 0
"""The rank on whose machine the store runs, in torchrun's agent or in the rank itself."""


@dataclass(frozen=True)
class Whereabouts:
    """The last known position and state of a rank."""

    rank: int
    step: int | None
    phase: str
    silent: bool
    """Whether the rank's heartbeat has stopped."""
    host: str = ""
    """Name of its machine; empty where all ranks share one."""
    has_left: bool = False
    """Whether the rank has announced that it leaves the run."""

    def words(self) -> str:
        """Return a clause for an error."""
        name = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        where = place(self.phase, self.step)
        return f"{name} has stopped answering{where}" if self.silent else f"{name} is{where or ' somewhere else'}"

    def failure(self, kind: str, message: str) -> Failure:
        """Return the report of another process about this rank."""
        return Failure(self.rank, "silent", self.phase, kind, message, self.step, time.time(), self.host)


class Sightings:
    """When this process last received a new beat of each other rank; filled by the heartbeat thread."""

    def __init__(self) -> None:
        self.last_words: dict[int, Whereabouts] = {}
        """Latest beat of each other rank."""
        self._beats: dict[int, str] = {}
        self._heard_at: dict[int, float] = {}
        self._store_at: float | None = None
        """When the store last answered; None before its first answer."""

    def take(self, beats: Mapping[int, str | None]) -> None:
        """Record each other rank's beat, None where it has none yet, that the store gave now.

        A rank was heard if its beat has changed.
        """
        self._store_at = timestamp = time.monotonic()
        for rank, beat in beats.items():
            if beat is not None and self._beats.get(rank) != beat:
                self._beats[rank], self._heard_at[rank] = beat, timestamp
                self.last_words[rank] = _parse(rank, beat, silent=False)

    def forgive(self, seconds: float) -> None:
        """Subtract the time in which this process itself did not run from every rank's silence."""
        self._heard_at = {rank: at + seconds for rank, at in self._heard_at.items()}
        self._store_at = None if self._store_at is None else self._store_at + seconds

    def store_silent_for(self, timestamp: float) -> float:
        """Return the seconds since the store answered."""
        return 0.0 if self._store_at is None else timestamp - self._store_at

    def silent_for(self, timestamp: float) -> dict[int, float]:
        """Return the seconds since the last new beat of each other rank, without those that have left the run."""
        # While the store does not answer nobody is heard: that says nothing of them, but of the store's own machine.
        store_silence = self.store_silent_for(timestamp)
        present = {rank: at for rank, at in self._heard_at.items() if not self.last_words[rank].has_left}
        seconds = {rank: max(0.0, timestamp - at - store_silence) for rank, at in present.items()}
        if STORE_RANK in seconds:
            host = self.last_words[STORE_RANK].host
            same_host = [rank for rank in seconds if self.last_words[rank].host == host]
            seconds |= {rank: max(seconds[rank], store_silence) for rank in same_host}
        return seconds


class Heartbeat:
    """Publishes one rank's beats, and reads those of the other ranks.

    Args:
        rank: Rank of this process.
        ranks: Number of ranks.
        board: Board that holds the beats.
        position: Returns (step, phase) of this rank.
        host: Name of this machine where ranks run on several; the other ranks' beats are then read with each beat.
        look: Called several times a second by the thread that beats.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        board: NoteBoard,
        position: Callable[[], tuple[int | None, str]],
        host: str = "",
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._host, self._look = rank, host, look
        self._board, self._position = board, position
        self._others = [other for other in range(ranks) if other != rank]
        self.sightings = Sightings()
        """Beats of the other ranks; filled only where ranks run on several machines."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def leave(self) -> None:
        """Note that this rank has left the run; called after `stop`."""
        self._board.write(f"beat-rank-{self._rank}", "0|||")

    def _run(self) -> None:
        count, next_beat = 0, 0.0
        while not self._stop.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + patience.current.beat_seconds
                count += 1
                step, phase = self._position()
                beat = f"{count}|{'' if step is None else step}|{self._host}|{phase}"
                self._board.write(f"beat-rank-{self._rank}", beat)
                if self._host and (beats := self._beats()) is not None:
                    self.sightings.take(beats)
            self._look()
            self._stop.wait(min(patience.current.failure_look_seconds, max(0.0, next_beat - time.monotonic())))

    def _beats(self) -> dict[int, str | None] | None:
        texts = self._board.read_all([f"beat-rank-{rank}" for rank in self._others])
        return None if texts is None else dict(zip(self._others, texts, strict=True))

    def missing(self) -> list[Whereabouts]:
        """Return the ranks that are silent; if there are none, those in another phase or step than this rank.

        Takes a few seconds, in which it listens for beats.
        """
        silent, beats = self._listen()
        late = [_parse(rank, text, silent=False) for rank, text in beats.items()]
        return silent or [state for state in late if (state.step, state.phase) != self._position()]

    def silent(self) -> list[Whereabouts]:
        """Return the ranks whose beats have stopped; none if this rank's heartbeat was never started.

        Takes a few seconds, in which it listens for beats.
        """
        silent, _ = self._listen()
        return silent if self._thread.ident is not None else []

    def _listen(self) -> tuple[list[Whereabouts], dict[int, str | None]]:
        nothing = dict.fromkeys(self._others)
        before = self._beats() or nothing
        time.sleep(patience.current.beat_seconds * MISSED_BEATS)
        after = self._beats() or nothing
        return [_parse(rank, text, silent=True) for rank, text in after.items() if text == before[rank]], after


def _parse(rank: int, text: str | None, *, silent: bool) -> Whereabouts:
    count, step, host, phase = (text or "|||").split("|", 3)
    return Whereabouts(rank, int(step) if step else None, phase, silent, host, has_left=count == "0")


@dataclass(frozen=True)
class Silence:
    """A machine whose ranks have all stopped beating, or some ranks of a machine that have."""

    host: str
    ranks: tuple[int, ...]
    whole_host: bool
    """All ranks of the machine are silent."""
    seconds: float
    last_words: Whereabouts
    """Latest beat of the first of `ranks`."""

    def words(self) -> str:
        """Return a sentence for the user."""
        if not self.ranks:
            return f"host {self.host}: the place where the ranks meet has not answered for {self.seconds:.0f} s"
        who = "rank" if len(self.ranks) == 1 else "ranks"
        names = f"{who} {', '.join(map(str, self.ranks))}"
        subject = f"host {self.host} ({names})" if self.whole_host else f"{names} on {self.host}"
        where = place(self.last_words.phase, self.last_words.step)
        return f"{subject} has not answered for {self.seconds:.0f} s; last heard{where}"

    def failure(self) -> Failure:
        """Return the report of a machine that is given up."""
        return replace(self.last_words, host=self.host).failure(LOST, self.words())


def silences(sightings: Sightings, own_host: str, timestamp: float, after_seconds: float) -> list[Silence]:
    """Return the machines of which all or some ranks have been silent for at least `after_seconds`.

    Args:
        sightings: Beats that this process has received.
        own_host: This machine, which never counts as silent as a whole.
        timestamp: Now, on the monotonic clock.
        after_seconds: Shortest silence that counts.
    """
    by_host: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for rank, seconds in sightings.silent_for(timestamp).items():
        by_host[sightings.last_words[rank].host][rank] = seconds
    result = []
    for host, ranks in sorted(by_host.items()):
        silent = tuple(sorted(rank for rank, seconds in ranks.items() if seconds >= after_seconds))
        if silent:
            whole_host = len(silent) == len(ranks) and host != own_host
            shortest = min(ranks[rank] for rank in silent)
            result.append(Silence(host, silent, whole_host, shortest, sightings.last_words[silent[0]]))
    store = sightings.store_silent_for(timestamp)
    if store >= after_seconds and not any(silence.whole_host for silence in result):
        # It is on this machine: torchrun was stopped here, or the network has gone. Nobody can be heard any more.
        result.append(Silence(own_host, (), True, store, Whereabouts(STORE_RANK, None, "", silent=True)))
    return result


class SilenceWatch:
    """Names machines that fall silent. It only reads `sightings`, so that no network call can block who looks.

    Args:
        sightings: Filled by the heartbeat thread.
        own_host: This machine.
        tell: Called with a sentence when a rank or machine falls silent or is heard again.
    """

    def __init__(self, sightings: Sightings, own_host: str, tell: Callable[[Silence, str], None]) -> None:
        self._sightings, self._own_host, self._tell = sightings, own_host, tell
        self._named: dict[tuple[str, tuple[int, ...]], Silence] = {}
        self._looked = time.monotonic()

    def look(self) -> Silence | None:
        """Tell what has changed since the last look; return a machine that is given up."""
        limits, timestamp = patience.current, time.monotonic()
        if timestamp - self._looked > 2 * limits.beat_seconds + 1:
            # This process itself was stopped or starved, and heard nobody meanwhile: others are not to blame.
            self._sightings.forgive(timestamp - self._looked)
        self._looked = timestamp
        found = silences(self._sightings, self._own_host, timestamp, limits.silent_host_seconds)
        silent = {(silence.host, silence.ranks): silence for silence in found}
        for key, silence in silent.items():
            if key not in self._named:
                given_up = f"given up after {limits.lost_host_seconds:.0f} s"
                self._tell(silence, f"{silence.words()}; {given_up if silence.whole_host else 'it is waited for'}")
        for gone in [self._named.pop(key) for key in list(self._named) if key not in silent]:
            if not any(set(gone.ranks) <= set(ranks) for _, ranks in silent):
                self._tell(gone, f"host {gone.host} answers again")
        self._named.update(silent)
        lost = silences(self._sightings, self._own_host, timestamp, limits.lost_host_seconds)
        return next((silence for silence in lost if silence.whole_host), None)
