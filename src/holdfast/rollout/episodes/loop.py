"""The loop of turns: what episodes ask goes to the engine, and what is sampled back to them.

No episode waits for another one's turn. Where environments are replayable and this process samples, they are waited for
before the next token is sampled: then what is decoded together follows from tokens alone, and a step that is made again
is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.episodes.endpoint import Call
from holdfast.rollout.episodes.episode import Decode, Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.sessions import Prepared, Session
from holdfast.rollout.sampling import mixed

_ATTEMPTS = 2
"""Times that an episode is begun: what ended its environment may not be its own doing."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A completion that an episode asks for."""

    index: int
    """Of the episode."""
    session: Session
    prepared: Prepared
    seed: int
    call: Call | None = None
    """What an agent asked; None for the turn of an environment."""


class EpisodeLoop(ABC):
    """Implements `TurnSource`: hands out what can be sampled, and takes it back.

    Subclasses say who asks.

    Args:
        requests: The episodes.
        pool: Environments or agents, started.
        decode: Tokens to text; with True, special ones are left out.
        limits: Of an episode.
        interrupted: Asked while the pool is waited for.
        in_order: Whether answers of the pool are waited for before anything else is sampled.
    """

    def __init__(
        self,
        requests: Sequence[EpisodeRequest],
        pool: EnvironmentPool,
        decode: Decode,
        limits: Limits,
        interrupted: Interrupted,
        *,
        in_order: bool,
    ) -> None:
        self._pool, self._decode, self._limits = pool, decode, limits
        self._interrupted, self._in_order = interrupted, in_order
        self._sessions = [Session(request, decode, limits) for request in requests]
        self._waiting = deque(range(len(requests)))
        self._active: set[int] = set()
        self._at_work: set[int] = set()
        """Episodes whose environment or agent may be heard of."""
        self._able: list[Asked] = []
        """What can be sampled."""
        self._sampling: dict[tuple[int, int], Asked] = {}
        """(request id, place) -> what is sampled."""
        self._request_count = 0
        # What an abandoned step asked for may still be answered: numbers are of one episode for good.
        self._first = pool.reserve(len(requests))

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, in the order of their requests."""
        return [session.episode for session in self._sessions]

    def ready(self, *, wait: bool) -> list[Request]:
        """Return what can be sampled now.

        Args:
            wait: Nothing else is to be done: return nothing only where nothing is left.
        """
        self._begin_waiting()
        while (self._at_work or (self._waiting and not self._active)) and not self._interrupted():
            must_wait = self._in_order or (wait and not self._able)
            is_heard = self._listen(must_wait=must_wait)
            self._begin_waiting()
            if not must_wait and not is_heard:
                break
        if self._interrupted():
            self.abandon()
        return self._requests()

    def finished(self, sampled: Sequence[Sampled]) -> None:
        """Take what has been sampled."""
        for completion in sampled:
            self._finished(self._sampling.pop((completion.request_id, completion.place)), completion)

    def abandon(self) -> None:
        """End every episode, those that wait for their final reward included: nobody wants them any more."""
        for index in sorted(self._active | set(self._waiting)):
            self._sessions[index].episode.ended = "aborted"
            self._leave(index)
        self._waiting.clear()
        self._able.clear()

    def ended(self) -> list[Episode]:
        """Return the episodes that have ended, and nothing of them changes any more; any thread may ask."""
        settled = [session.episode for index, session in enumerate(self._sessions) if index not in self._active]
        return [episode for episode in settled if episode.ended not in {None, "aborted"}]

    @abstractmethod
    def _start(self, index: int, request: EpisodeRequest) -> None:
        """Let the pool begin an episode."""

    @abstractmethod
    def _listen(self, *, must_wait: bool) -> bool:
        """Hear what has come; return whether something has."""

    @abstractmethod
    def _heard(self, index: int, answer: Answer) -> None:
        """Take an answer of the pool."""

    @abstractmethod
    def _finished(self, asked: Asked, completion: Sampled) -> None:
        """Take a completion."""

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._active) < self._limits.instances:
            if not self._pool.admit(self._first + self._waiting[0]):
                return
            self._begin(self._waiting.popleft())

    def _begin(self, index: int) -> None:
        before = self._sessions[index].episode
        session = self._sessions[index] = Session(before.request, self._decode, self._limits)
        session.episode.attempts, session.episode.waited_seconds = before.attempts + 1, before.waited_seconds
        self._active.add(index)
        self._at_work.add(index)
        self._start(index, before.request)

    def _hear(self, seconds: float) -> bool:
        """Take the answers of the pool; return whether there were some."""
        answers = self._pool.answers(seconds, [self._first + index for index in self._at_work])
        for answer in sorted(answers, key=lambda answer: answer.episode):
            self._heard(answer.episode - self._first, answer)
        return bool(answers)

    def _ask(self, index: int, session: Session, prepared: Prepared, call: Call | None = None) -> None:
        """Queue a completion; the seed of the first is the episode's."""
        seed, number = session.episode.request.seed, session.asked_count - 1
        self._able.append(Asked(index, session, prepared, mixed(seed, number) if number else seed, call))

    def _requests(self) -> list[Request]:
        """Return what can be sampled, equal prompts together."""
        by_prompt: dict[bytes, list[Asked]] = {}
        for asked in self._able:
            by_prompt.setdefault(asked.prepared.tokens.tokens.tobytes(), []).append(asked)
        self._able = []
        requests = []
        for alike in by_prompt.values():
            number, self._request_count = self._request_count, self._request_count + 1
            self._sampling |= {(number, place): asked for place, asked in enumerate(alike)}
            requests.append(Request(number, alike[0].prepared.tokens.tokens, tuple(asked.seed for asked in alike)))
        return requests

    def _fail(self, index: int, message: str) -> None:
        """Let an episode begin once more, or end it."""
        episode = self._sessions[index].episode
        self._leave(index)
        if episode.attempts < _ATTEMPTS:
            self._waiting.appendleft(index)
            return
        episode.fault, episode.ended = message, "fault"

    def _leave(self, index: int) -> None:
        if index in self._active:
            self._pool.leave(self._first + index)
        self._active.discard(index)
        self._at_work.discard(index)
