"""The loop of agents: what they ask at an endpoint goes to the engine, and what is sampled back to them.

No call waits for another one: an agent that asks while others are answered is decoded together with them.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence

from holdfast.data.tokens.chat_template import RENDERING_ERRORS
from holdfast.environments.base import StepResult
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.processes.user_code import describe_error
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.episodes.chat_calls import CallRefused
from holdfast.rollout.episodes.endpoint import Call, Endpoint, session_ended
from holdfast.rollout.episodes.loop import ATTEMPTS, Decode, Ended, Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.sessions import Prepared, Session, SyntaxOf
from holdfast.rollout.sampling import mixed
from holdfast.text.escaping import escaped_paragraph
from holdfast.types import Finish

_LOOK_SECONDS = 0.005
"""Between two looks at agents that have returned, where nothing is asked."""
_CAUSED = (MemoryError, *RENDERING_ERRORS)
"""What a request can cause; anything else is a mistake of ours and ends the run."""


class AgentLoop:
    """Implements `TurnSource`: hands out what agents ask, and answers them.

    Args:
        requests: The episodes.
        agents: Started.
        endpoint: Entered.
        syntax_of: How conversations with tools are written and read.
        decode: Tokens to text; with True, special ones are left out.
        limits: Of an episode.
        interrupted: Asked while agents are waited for.
    """

    def __init__(  # noqa: PLR0913 - as the loop of environments, and what agents ask at
        self,
        requests: Sequence[EpisodeRequest],
        agents: EnvironmentPool,
        endpoint: Endpoint,
        syntax_of: SyntaxOf,
        decode: Decode,
        limits: Limits,
        interrupted: Interrupted,
    ) -> None:
        self._requests, self._agents, self._endpoint = list(requests), agents, endpoint
        self._syntax_of, self._decode, self._limits = syntax_of, decode, limits
        self._interrupted = interrupted
        self._sessions = [self._session(request) for request in requests]
        self._waiting = deque(range(len(requests)))
        self._keys: dict[int, str] = {}
        """Of episodes whose agent is running."""
        self._episodes: dict[str, int] = {}
        """The same by key."""
        self._sampling: dict[tuple[int, int], tuple[Call, Prepared, Session]] = {}
        """(request id, place) of what is sampled."""
        self._able: list[tuple[Call, Prepared, Session, int]] = []
        """What can be sampled, with its seed."""
        self._printed: set[type[Exception]] = set()
        """Kinds of errors whose traceback is in the log."""
        self._request_count = 0
        # What an abandoned step asked for may still be answered: numbers are of one episode for good.
        self._first = agents.reserve(len(requests))

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, in the order of their requests."""
        return [session.episode for session in self._sessions]

    def ready(self, *, wait: bool) -> list[Request]:
        """Return what agents ask now.

        Args:
            wait: Nothing else is to be done: return nothing only where nothing is left.
        """
        while not self._interrupted():
            for answer in self._agents.answers(0.0):
                self._hear(answer)
            self._begin_waiting()
            is_idle = wait and not self._able and bool(self._keys)
            for call in self._endpoint.take(_LOOK_SECONDS if is_idle else 0.0):
                self._take(call)
            if not wait or self._able or not self._keys:
                return self._requested()
        self.abandon()
        return []

    def finished(self, sampled: Sequence[Sampled]) -> None:
        """Answer the calls of what has been sampled."""
        for completion in sampled:
            call, prepared, session = self._sampling.pop((completion.request_id, completion.place))
            index = self._episodes.get(call.key)
            if completion.finish is Finish.ABORT or index is None:
                call.refuse(session_ended())
                continue
            try:
                call.answer(session.complete(prepared, completion))
            except _CAUSED as error:
                self._fail(index, call, error)
            session.answered_seconds += time.monotonic() - call.taken_at

    def abandon(self) -> None:
        """End every episode: nobody wants them any more."""
        for index in sorted({*self._keys, *self._waiting}):
            self._sessions[index].episode.ended = "aborted"
            self._leave(index)
        for call in [call for call, *_ in self._sampling.values()] + [call for call, *_ in self._able]:
            call.refuse(session_ended())
        self._waiting.clear()
        self._able.clear()

    def _session(self, request: EpisodeRequest) -> Session:
        return Session(request, self._syntax_of, self._decode, self._limits)

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._keys) < self._limits.instances:
            self._begin(self._waiting.popleft())

    def _begin(self, index: int) -> None:
        before, request = self._sessions[index].episode, self._requests[index]
        session = self._sessions[index] = self._session(request)
        session.episode.attempts = before.attempts + 1
        session.episode.waited_seconds = before.waited_seconds
        key = self._endpoint.open()
        self._keys[index], self._episodes[key] = key, index
        self._agents.run(self._first + index, request.row, request.seed, self._endpoint.base_url, key)

    def _take(self, call: Call) -> None:
        index = self._episodes.get(call.key)
        if index is None:
            call.refuse(session_ended())
            return
        session, call.taken_at = self._sessions[index], time.monotonic()
        number = session.call_count
        try:
            prepared = session.prepare(call.asked)
        except CallRefused as refusal:
            call.refuse(refusal)
            return
        except _CAUSED as error:
            self._fail(index, call, error)
            return
        seed = self._requests[index].seed
        self._able.append((call, prepared, session, mixed(seed, number) if number else seed))

    def _fail(self, index: int, call: Call, error: Exception) -> None:
        """End one agent's episode; what it asks or is told ends no other one's."""
        if type(error) not in self._printed:
            self._printed.add(type(error))
            print(escaped_paragraph("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        episode = self._sessions[index].episode
        episode.fault, episode.ended = f"asked what cannot be answered: {describe_error(error)}", "fault"
        self._leave(index)
        call.refuse(CallRefused(f"this call cannot be answered ({describe_error(error)}); its episode has ended"))

    def _requested(self) -> list[Request]:
        """Return what can be sampled, equal prompts together."""
        by_prompt: dict[bytes, list[tuple[Call, Prepared, Session, int]]] = {}
        for able in self._able:
            by_prompt.setdefault(able[1].tokens.tokens.tobytes(), []).append(able)
        self._able = []
        requests = []
        for alike in by_prompt.values():
            number, self._request_count = self._request_count, self._request_count + 1
            self._sampling |= {
                (number, place): (call, prepared, session) for place, (call, prepared, session, _) in enumerate(alike)
            }
            requests.append(Request(number, alike[0][1].tokens.tokens, tuple(seed for *_, seed in alike)))
        return requests

    def _hear(self, answer: Answer) -> None:
        index = answer.episode - self._first
        if index not in self._keys:
            return
        session = self._sessions[index]
        episode = session.episode
        episode.waited_seconds += max(0.0, answer.seconds - session.answered_seconds)
        self._leave(index)
        if answer.result is not None:
            _returned(session, answer.result)
        elif (ended := _limit_of(session, answer)) is not None:
            episode.ended = ended
        elif episode.attempts < ATTEMPTS:
            self._begin(index)
        else:
            episode.fault, episode.ended = answer.message, "fault"

    def _leave(self, index: int) -> None:
        key = self._keys.pop(index, None)
        if key is not None:
            del self._episodes[key]
            self._endpoint.end(key)
            self._agents.leave(self._first + index)


def _returned(session: Session, result: StepResult) -> None:
    """End the episode of an agent that returned."""
    episode = session.episode
    if episode.tokens is None:
        episode.fault, episode.ended = "returned without asking the policy anything", "fault"
        return
    episode.reward = episode.turn_rewards[-1] = result.reward
    episode.info |= result.info
    episode.ended = session.refused or "done"


def _limit_of(session: Session, answer: Answer) -> Ended | None:
    """Return the limit that ended an agent which did not return; None where it failed."""
    if session.episode.tokens is None:
        return None
    if answer.fault == "timeout":
        return "seconds"
    return session.refused if answer.fault == "raised" else None
