"""Turns in environments: an answer of the policy is a turn, and what is observed after it asks for the next one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from holdfast.data.tokens.chat_template import TemplateRefuses
from holdfast.environments.base import APPENDED, Message, StepResult, Turn, extent_of
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.episodes.chat_calls import CallRefused
from holdfast.rollout.episodes.episode import Decode, Ended, EpisodeRequest, Limits
from holdfast.rollout.episodes.loop import Asked, EpisodeLoop
from holdfast.rollout.episodes.sessions import Prepared, Session, Syntax
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import Finish

_LOOK_SECONDS = 0.2
"""Between two looks whether the step is abandoned, where an environment is waited for."""


class EnvironmentLoop(EpisodeLoop):
    """Episodes in environments.

    Args:
        requests: The episodes.
        environments: Started.
        decode: Tokens to text; with True, special ones are left out.
        limits: Of an episode.
        interrupted: Asked while an environment is waited for.
        in_order: Whether an answer is waited for before anything else is sampled, where environments are replayable.
    """

    def __init__(
        self,
        requests: Sequence[EpisodeRequest],
        environments: EnvironmentPool,
        decode: Decode,
        limits: Limits,
        interrupted: Interrupted,
        *,
        in_order: bool = True,
    ) -> None:
        in_order = in_order and environments.replayable
        super().__init__(requests, environments, decode, limits, interrupted, in_order=in_order)

    def _start(self, index: int, request: EpisodeRequest) -> None:
        self._pool.begin(self._first + index, request.row, request.seed)

    def _listen(self, *, must_wait: bool) -> bool:
        return self._hear(_LOOK_SECONDS if must_wait else 0.0)

    def _requests(self) -> list[Request]:
        self._able.sort(key=lambda asked: asked.index)
        return super()._requests()

    def _finished(self, asked: Asked, completion: Sampled) -> None:
        index, session = asked.index, asked.session
        answered = session.complete(asked.prepared, completion)
        del session.answered[:-1]  # each holds a whole conversation, and only the last one goes on
        if completion.finish is Finish.ABORT:
            session.episode.ended = "aborted"
            self._leave(index)
        elif completion.finish is Finish.LENGTH and self._limits.ends_when_cut:
            self._end(index, "cut")
        else:
            number = session.episode.turn_count - 1
            turn = Turn(number, answered.text, answered.calls, completion.finish.value)
            self._pool.take(self._first + index, turn)
            self._at_work.add(index)

    def _heard(self, index: int, answer: Answer) -> None:
        session = self._sessions[index]
        self._at_work.discard(index)
        session.episode.waited_seconds += answer.seconds
        if answer.result is None:
            self._fail(index, answer.message)
            return
        try:
            if session.episode.tokens is None:
                self._begun(index, session, answer.result.messages)
            else:
                self._observed(index, session, answer.result)
        except TemplateRefuses as refusal:
            self._fail(index, f"said what the template cannot write: {refusal}")
        except CallRefused:
            assert session.refused is not None
            self._end(index, session.refused)

    def _begun(self, index: int, session: Session, messages: Sequence[Message]) -> None:
        if self._is_too_long(messages):
            raise TemplateRefuses(f"more than data.max_length={self._limits.max_length} tokens can have")
        episode, request = session.episode, session.episode.request
        episode.began_at = time.monotonic()
        episode.messages = with_begun(request.messages, messages)
        episode.prompt_messages = len(episode.messages)
        prompt = np.asarray(request.writer.opening(episode.messages), np.int64) if messages else request.prompt
        episode.tokens = EpisodeTokens.of_prompt(prompt)
        begun = tuple(episode.messages)
        self._go_on(index, session.prepare(begun, begun, _syntax(request), prompt=prompt))

    def _observed(self, index: int, session: Session, result: StepResult) -> None:
        episode, request = session.episode, session.episode.request
        episode.reward += result.reward
        if episode.turn_rewards:
            episode.turn_rewards[-1] += result.reward
        episode.info |= result.info
        episode.count_calls(result.called, result.failed_calls)
        is_too_long = self._is_too_long(result.messages)
        episode.messages += _shortened(result.messages, self._limits.max_characters) if is_too_long else result.messages
        if episode.ended is not None or result.done:
            episode.ended = episode.ended or "done"
            self._leave(index)
        elif session.has_failed_too_often:
            self._end(index, "failed_calls")
        elif episode.turn_count >= self._limits.max_turns:
            self._end(index, "turns")
        elif is_too_long:
            self._end(index, "room")
        else:
            earlier, rest, syntax = session.answered[-1], tuple(result.messages), _syntax(request)
            prepared = session.follow(earlier, rest, syntax)
            if prepared is None:
                messages = (*earlier.messages, earlier.answer, *rest)
                prepared = session.prepare(messages, (*earlier.written, *rest), syntax)
            self._go_on(index, prepared)

    def _is_too_long(self, messages: Sequence[Message]) -> bool:
        characters = extent_of([[*message.values()] for message in messages]).characters
        return len(messages) > self._limits.max_length or characters > self._limits.max_characters

    def _go_on(self, index: int, prepared: Prepared) -> None:
        """Let an episode take another turn, if there is time for one."""
        session, seconds = self._sessions[index], self._limits.max_seconds
        if seconds is not None and time.monotonic() - session.episode.began_at > seconds:
            self._end(index, "seconds")
        else:
            self._ask(index, session, prepared)

    def _end(self, index: int, ended: Ended) -> None:
        """End an episode otherwise than by its environment, which may still have a reward for it."""
        self._sessions[index].episode.ended = ended
        self._pool.finish(self._first + index)
        self._at_work.add(index)


def _syntax(request: EpisodeRequest) -> Syntax:
    return Syntax(request.writer, request.parse)


def _shortened(messages: Sequence[Message], characters: int) -> list[Message]:
    """Return the beginning of messages that no policy reads: so many characters of their texts, with a mark."""
    kept: list[Message] = []
    for message in messages:
        content = message["content"]
        is_whole = len(content) <= characters
        text = content if is_whole else f"{content[:characters]} ({len(content) - characters} more characters)"
        kept.append({"role": message["role"][:characters], "content": text})
        characters -= max(len(content), 1)
        if characters <= 0:
            break
    return kept


def with_begun(prompt: Sequence[Message], begun: Sequence[Message]) -> list[Message]:
    """Return a row's prompt with what its environment said at the start."""
    messages = [dict(message) for message in prompt]
    for message in begun:
        if message["role"] != APPENDED:
            messages.append(dict(message))
            continue
        users = [earlier for earlier in messages if earlier["role"] == "user"]
        if users:
            users[-1]["content"] = f"{users[-1]['content']}{message['content']}"
        else:
            messages.append({"role": "user", "content": message["content"]})
    return list(messages)
