"""Hosts that vanish: which machines of a run say nothing any more, and for how long.

A rank that is silent alone may be busy in code that lets no other thread run, so it is named and waited for. A machine
all of whose ranks are silent was killed, stopped or cut off: after `patience.lost_host_seconds` it is given up, since
whoever waits in a collective with it would wait until the time-out.

Times are this process's own monotonic clock; those of other machines are never compared with it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from holdfast import patience
from holdfast.parallel.failure.heartbeat import STORE_RANK, Sightings, Whereabouts
from holdfast.parallel.failure.reports import LOST, Failure


@dataclass(frozen=True)
class Silence:
    """A machine, or some ranks of one, that say nothing."""

    host: str
    ranks: tuple[int, ...]
    whole: bool
    """All ranks of the machine are silent."""
    seconds: float
    last_words: Whereabouts
    """Of the first of them."""

    def words(self) -> str:
        """Return a sentence for the user."""
        if not self.ranks:
            return f"host {self.host}: the place where the ranks meet has not answered for {self.seconds:.0f} s"
        who = "rank" if len(self.ranks) == 1 else "ranks"
        names = f"{who} {', '.join(map(str, self.ranks))}"
        subject = f"host {self.host} ({names})" if self.whole else f"{names} on {self.host}"
        return f"{subject} has not answered for {self.seconds:.0f} s; last heard{self.last_words.place()}"

    def failure(self) -> Failure:
        """Return what is reported when it is given up."""
        last = self.last_words
        return Failure(last.rank, "silent", last.phase, LOST, self.words(), last.step, time.time(), host=self.host)


def silences(sightings: Sightings, own_host: str, now: float, after_seconds: float) -> list[Silence]:
    """Return which machines have been silent for so long, wholly or in part.

    Args:
        sightings: Of one rank.
        own_host: Its machine, which never counts as silent as a whole.
        now: On the monotonic clock.
        after_seconds: Silence that counts.
    """
    by_host: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for rank, seconds in sightings.silent_for(now).items():
        by_host[sightings.last_words[rank].host][rank] = seconds
    result = []
    for host, ranks in sorted(by_host.items()):
        silent = tuple(sorted(rank for rank, seconds in ranks.items() if seconds >= after_seconds))
        if silent:
            whole = len(silent) == len(ranks) and host != own_host
            shortest = min(ranks[rank] for rank in silent)
            result.append(Silence(host, silent, whole, shortest, sightings.last_words[silent[0]]))
    store = sightings.store_silent_for(now)
    if store >= after_seconds and not any(each.whole for each in result):
        # It is on this machine: torchrun was stopped here, or the network has gone. Nobody can be heard any more.
        result.append(Silence(own_host, (), True, store, Whereabouts(STORE_RANK, None, "", silent=True)))
    return result


class SilenceWatch:
    """Names machines that fall silent, and gives up those that stay so; a thread that asks nobody.

    Args:
        sightings: Filled by the heartbeat.
        own_host: This rank's machine.
        tell: Told a sentence when somebody falls silent or is heard again.
        give_up: Told once that a machine is given up.
    """

    def __init__(
        self,
        sightings: Sightings,
        own_host: str,
        tell: Callable[[Silence, str], None],
        give_up: Callable[[Silence], None],
    ) -> None:
        self._sightings, self._own_host = sightings, own_host
        self._tell, self._give_up = tell, give_up
        self._named: dict[tuple[str, tuple[int, ...]], Silence] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdfast-silence", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(patience.current.beat_seconds):
            now = time.monotonic()
            if now - looked > 2 * patience.current.beat_seconds + 1:
                # This process itself was stopped or starved, and heard nobody meanwhile: others are not to blame.
                self._sightings.forgive(now - looked)
            looked = now
            self._look(now)
            lost = [
                each
                for each in silences(self._sightings, self._own_host, now, patience.current.lost_host_seconds)
                if each.whole
            ]
            if lost:
                self._give_up(lost[0])
                return

    def _look(self, now: float) -> None:
        silent = {
            (each.host, each.ranks): each
            for each in silences(self._sightings, self._own_host, now, patience.current.silent_host_seconds)
        }
        for key, each in silent.items():
            if key not in self._named:
                limit = patience.current.lost_host_seconds
                more = f"; given up after {limit:.0f} s" if each.whole else "; it is waited for"
                self._tell(each, f"{each.words()}{more}")
        for key in [key for key in self._named if key not in silent]:
            gone = self._named.pop(key)
            if not any(set(gone.ranks) <= set(ranks) for _, ranks in silent):
                self._tell(gone, f"host {gone.host} answers again")
        self._named.update(silent)
