"""Agents that own their loop: each request at the endpoint asks for a completion of its episode."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.data.tokens.chat_template import RENDERING_ERRORS, TemplateRefuses
from holdfast.environments.base import Message, StepResult
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.processes.user_code import describe_error
from holdfast.rollout.engine import Interrupted, Sampled
from holdfast.rollout.episodes.calls import UNKNOWN
from holdfast.rollout.episodes.chat_calls import (
    CallRefused,
    ChatCall,
    answer_message,
    as_read_again,
    completion_reply,
    same,
)
from holdfast.rollout.episodes.endpoint import Call, Endpoint, session_ended
from holdfast.rollout.episodes.episode import Decode, Ended, EpisodeRequest, Limits
from holdfast.rollout.episodes.loop import Asked, EpisodeLoop
from holdfast.rollout.episodes.sessions import Answered, Prepared, Session, Syntax
from holdfast.text.escaping import escaped_paragraph
from holdfast.types import Finish

SyntaxOf = Callable[[tuple[Mapping[str, Any], ...]], Syntax]
"""From schemas of tools; raises `CallRefused` where the template cannot write them."""

_LOOK_SECONDS = 0.005
"""Between two looks at agents that have returned, where nothing is asked."""
_CAUSED = (MemoryError, *RENDERING_ERRORS)
"""What a request can cause; anything else is a mistake of ours and ends the run."""
_OBSERVED = ("tool", "user")
"""Roles of messages that may follow an answer where its tokens go on."""


class AgentLoop(EpisodeLoop):
    """Episodes of agents.

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
        super().__init__(requests, agents, decode, limits, interrupted, in_order=False)
        self._endpoint, self._syntax_of = endpoint, syntax_of
        self._keys: dict[int, str] = {}
        """Of episodes whose agent is running."""
        self._episodes: dict[str, int] = {}
        """The same by key."""
        self._answered_seconds: dict[int, float] = {}
        """From calls to their answers, by episode."""
        self._printed: set[type[Exception]] = set()
        """Kinds of errors whose traceback is in the log."""

    def _tell_guesses(self, index: int) -> None:
        """Count requests without a key of an episode as told by the episode that ends next."""
        if guesses := self._endpoint.guesses:
            self._endpoint.guesses -= guesses
            info = self._sessions[index].episode.info
            info["refused_guesses"] = info.get("refused_guesses", 0.0) + guesses

    def abandon(self) -> None:
        """End every episode, and refuse what its agent asks."""
        calls = [asked.call for asked in (*self._sampling.values(), *self._able)]
        super().abandon()
        for call in calls:
            assert call is not None
            call.refuse(session_ended())

    def _start(self, index: int, request: EpisodeRequest) -> None:
        key = self._endpoint.open()
        self._keys[index], self._episodes[key], self._answered_seconds[index] = key, index, 0.0
        self._pool.run(self._first + index, request.row, request.seed, self._endpoint.base_url, key)

    def _listen(self, *, must_wait: bool) -> bool:
        is_heard = self._hear(0.0)
        calls = self._endpoint.take(_LOOK_SECONDS if must_wait and not is_heard else 0.0)
        for call in calls:
            self._take(call)
        return is_heard or bool(calls)

    def _finished(self, asked: Asked, completion: Sampled) -> None:
        call, session = asked.call, asked.session
        assert call is not None
        if completion.finish is Finish.ABORT or call.key not in self._episodes:
            call.refuse(session_ended())
            return
        try:
            call.answer(self._reply(call.asked, session, asked.prepared, completion))
        except _CAUSED as error:
            self._break(asked.index, call, error)
        else:
            self._answered_seconds[asked.index] += time.monotonic() - call.taken_at

    def _reply(self, asked: ChatCall, session: Session, prepared: Prepared, completion: Sampled) -> dict[str, Any]:
        """Return what a call is answered."""
        episode, turn = session.episode, session.episode.turn_count
        completion = _cut(completion, asked.max_tokens)
        answered = session.complete(prepared, completion)
        mistakes = sum(bool(call.mistake) for call in answered.calls)
        episode.count_calls(Counter(UNKNOWN if call.mistake else call.name for call in answered.calls), mistakes)
        # A call that cannot be read is text to the agent.
        message = answer_message(answered.text, () if mistakes else answered.calls, turn)
        answered.answer = as_read_again(message)
        episode.prompt_messages = prepared.prompt_messages
        episode.request = replace(episode.request, writer=prepared.syntax.writer)
        number = f"{episode.request.seed:x}-{turn}"
        return completion_reply(number, message, prepared.tokens.tokens.tolist(), completion, asked, self._decode)

    def _take(self, call: Call) -> None:
        index = self._episodes.get(call.key)
        if index is None:
            call.refuse(session_ended())
            return
        session, call.taken_at = self._sessions[index], time.monotonic()
        try:
            prepared = self._prepared(session, call.asked)
        except CallRefused as refusal:
            call.refuse(refusal)
        except _CAUSED as error:
            self._break(index, call, error)
        else:
            self._ask(index, session, prepared, call)

    def _prepared(self, session: Session, asked: ChatCall) -> Prepared:
        session.check(len(asked.messages), asked.characters)
        syntax = self._syntax_of(asked.tools)
        try:
            earlier = _longest_earlier(session, asked)
            if earlier is not None:
                going_on = session.follow(earlier, asked.messages[len(earlier.messages) + 1 :], syntax)
                if going_on is not None:
                    return replace(going_on, messages=asked.messages)
            written = tuple(_as_written(session, message) for message in asked.messages)
            return session.prepare(asked.messages, written, syntax, tools=asked.tools)
        except TemplateRefuses as refusal:
            raise CallRefused(f"the chat template cannot write these messages: {refusal}") from None

    def _break(self, index: int, call: Call, error: Exception) -> None:
        """End one agent's episode; what it asks or is told ends no other one's."""
        if type(error) not in self._printed:
            self._printed.add(type(error))
            print(escaped_paragraph("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        episode = self._sessions[index].episode
        episode.fault, episode.ended = f"asked what cannot be answered: {describe_error(error)}", "fault"
        self._leave(index)
        call.refuse(CallRefused(f"this call cannot be answered ({describe_error(error)}); its episode has ended"))

    def _heard(self, index: int, answer: Answer) -> None:
        session = self._sessions[index]
        episode = session.episode
        episode.waited_seconds += max(0.0, answer.seconds - self._answered_seconds[index])
        if answer.result is not None:
            self._leave(index)
            _returned(session, answer.result)
        elif (ended := _limit_of(session, answer)) is not None:
            self._leave(index)
            episode.ended = ended
        else:
            self._fail(index, answer.message)

    def _leave(self, index: int) -> None:
        super()._leave(index)
        self._tell_guesses(index)
        if (key := self._keys.pop(index, None)) is not None:
            del self._episodes[key]
            self._endpoint.end(key)


def _longest_earlier(session: Session, asked: ChatCall) -> Answered | None:
    """Return the longest conversation that a call goes on from; of several, one that nothing goes on from yet."""
    candidates = [answered for answered in session.answered if _extends(asked, answered)]
    return max(candidates, key=lambda answered: (len(answered.messages), answered.is_last), default=None)


def _extends(asked: ChatCall, answered: Answered) -> bool:
    conversation = (*answered.messages, answered.answer)
    rest = asked.messages[len(conversation) :]
    return (
        bool(rest)
        and asked.tools == answered.tools
        and all(message["role"] in _OBSERVED for message in rest)
        and all(map(same, conversation, asked.messages))
    )


def _as_written(session: Session, message: Message) -> Message:
    """Return what the template is given for a message: what the policy said is written as it said it."""
    if message["role"] != "assistant":
        return message
    said = (answered for answered in session.answered if same(answered.answer, message))
    return next((answered.written[-1] for answered in said), message)


def _cut(sampled: Sampled, most: int | None) -> Sampled:
    """Return the first tokens of a completion: they are what it would have been with a lower limit."""
    if most is None or sampled.tokens.size <= most:
        return sampled
    return sampled._replace(
        tokens=sampled.tokens[:most],
        logprobs=sampled.logprobs[:most],
        finish=Finish.LENGTH,
        segments=tuple((start, version) for start, version in sampled.segments if start < most),
    )


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
