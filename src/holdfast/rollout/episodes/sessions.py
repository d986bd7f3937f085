"""One agent's calls as an episode: every completion is trained once, as the tokens that were sampled.

A call whose messages begin with those of an earlier one and its answer goes on from the tokens of that one. Any other
call begins a sample of its own, as does a second one that goes on from the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from holdfast.data.tokens.chat_template import TemplateRefuses
from holdfast.environments.base import Message
from holdfast.rollout.engine import Sampled
from holdfast.rollout.episodes.calls import Parse
from holdfast.rollout.episodes.chat_calls import CallRefused, ChatCall, answer_message, as_read_again, same
from holdfast.rollout.episodes.endpoint import MODEL
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.loop import Decode, Ended, Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import Finish

_OBSERVED = ("tool", "user")
"""Roles of messages that may follow an answer where its tokens go on."""


class Syntax(NamedTuple):
    """How turns are written and read."""

    writer: TurnTemplate
    parse: Parse | None
    note: str = ""
    """What a user should know of the template, as a sentence."""


SyntaxOf = Callable[[tuple[Mapping[str, Any], ...]], Syntax]
"""From schemas of tools; raises `CallRefused` where the template cannot write them."""


@dataclass(eq=False)
class _Answered:
    """A conversation up to an answer of the policy."""

    messages: tuple[Message, ...]
    written: tuple[Message, ...]
    """The same as templates are given them: with the special tokens of what the policy said."""
    asked_messages: int
    """Of these, those that the agent wrote before the first answer of the sample."""
    tools: tuple[Mapping[str, Any], ...]
    tokens: EpisodeTokens
    line: int
    """Which sample of the session its tokens are of."""
    is_last: bool = True
    """Whether nothing goes on from here yet."""


@dataclass(frozen=True)
class Prepared:
    """A call whose completion can be sampled."""

    asked: ChatCall
    syntax: Syntax
    tokens: EpisodeTokens
    """What the completion follows."""
    written: tuple[Message, ...]
    line: int | None
    """The sample that goes on; None where one begins."""
    asked_messages: int


class Session:
    """The calls of one agent.

    Args:
        request: The episode that it is.
        syntax_of: How conversations with tools are written and read.
        decode: Tokens to text; with True, special ones are left out.
        limits: Of an episode.
    """

    def __init__(self, request: EpisodeRequest, syntax_of: SyntaxOf, decode: Decode, limits: Limits) -> None:
        self.episode = Episode(request)
        self.call_count = 0
        """Calls that have been taken."""
        self.refused: Ended | None = None
        """The limit at which a call was refused last."""
        self.answered_seconds = 0.0
        """From calls to their answers."""
        self._syntax_of, self._decode, self._limits = syntax_of, decode, limits
        self._answered: list[_Answered] = []
        self._lines: list[EpisodeTokens] = []

    def prepare(self, asked: ChatCall) -> Prepared:
        """Return what a call's completion follows.

        Raises:
            CallRefused: The episode has no turn or no room left, or the template cannot write the messages.
        """
        if self.call_count >= self._limits.max_turns:
            self.refused = "turns"
            raise CallRefused(
                f"this episode has had its {self._limits.max_turns} completions (environment.max_turns); return",
                code="rate_limit_exceeded",
            )
        longest = self._limits.max_length
        if asked.characters > self._limits.max_characters:
            self._refuse_room(f"{asked.characters} characters, more than data.max_length={longest} tokens can have")
        if len(asked.messages) > longest:
            self._refuse_room(f"{len(asked.messages)} messages, more than data.max_length={longest} tokens can have")
        syntax = self._syntax_of(asked.tools)
        try:
            prepared = self._prepared(asked, syntax)
        except TemplateRefuses as refusal:
            raise CallRefused(f"the chat template cannot write these messages: {refusal}") from None
        size = prepared.tokens.tokens.size
        if size + self._limits.max_new_tokens > longest:
            self._refuse_room(
                f"{size} tokens, and data.max_length={longest} leaves no room for a completion of "
                f"{self._limits.max_new_tokens}"
            )
        self.call_count, self.refused = self.call_count + 1, None
        return prepared

    def _refuse_room(self, what: str) -> NoReturn:
        self.refused = "room"
        raise CallRefused(f"the conversation has {what}", code="context_length_exceeded")

    def _prepared(self, asked: ChatCall, syntax: Syntax) -> Prepared:
        earlier = self._longest_earlier(asked)
        if earlier is not None:
            rest = asked.messages[len(earlier.messages) :]
            written = (*earlier.written, *rest)
            tokens = _going_on(syntax.writer, earlier.tokens, written, rest)
            if tokens is not None and earlier.is_last:
                earlier.is_last = False
                return Prepared(asked, syntax, tokens, written, earlier.line, earlier.asked_messages)
            if tokens is not None:
                prompt = EpisodeTokens.of_prompt(tokens.tokens)
                return Prepared(asked, syntax, prompt, written, None, len(asked.messages))
        written = tuple(map(self._as_written, asked.messages))
        prompt = EpisodeTokens.of_prompt(np.asarray(syntax.writer.opening(written), np.int64))
        return Prepared(asked, syntax, prompt, written, None, len(asked.messages))

    def _longest_earlier(self, asked: ChatCall) -> _Answered | None:
        """Return the longest conversation that a call goes on from; of several, one that nothing goes on from yet."""
        candidates = [answered for answered in self._answered if _extends(asked, answered)]
        return max(candidates, key=lambda answered: (len(answered.messages), answered.is_last), default=None)

    def _as_written(self, message: Message) -> Message:
        """Return what the template is given for a message: what the policy said is written as it said it."""
        if message["role"] != "assistant":
            return message
        said = (answered for answered in self._answered if same(answered.messages[-1], message))
        return next((answered.written[-1] for answered in said), message)

    def complete(self, prepared: Prepared, sampled: Sampled) -> dict[str, Any]:
        """Take a completion in, and return what its call is answered."""
        episode, turn = self.episode, self.episode.turn_count
        sampled = _cut(sampled, prepared.asked.max_tokens)
        tokens = prepared.tokens.with_turn(sampled)
        said, writer = sampled.tokens.tolist(), prepared.syntax.writer
        text = self._decode(said, True)
        written = self._decode(said[:-1] if said and writer.is_end(said[-1]) else said, False)
        calls = () if prepared.syntax.parse is None else prepared.syntax.parse(written)
        for call in calls:
            episode.called[call.name if not call.mistake else "unknown"] += 1
        episode.failed_calls += sum(bool(call.mistake) for call in calls)
        if any(call.mistake for call in calls):
            calls = ()  # the agent reads it as text
        message = answer_message(text, calls, turn)
        line = prepared.line
        if line is None:
            line = len(self._lines)
            self._lines.append(tokens)
        else:
            self._lines[line] = tokens
        answered = _Answered(
            (*prepared.asked.messages, as_read_again(message)),
            (*prepared.written, {"role": "assistant", "content": written}),
            prepared.asked_messages,
            prepared.asked.tools,
            tokens,
            line,
        )
        self._answered.append(answered)
        episode.earlier, episode.tokens = self._lines[:-1], self._lines[-1]
        episode.turn_rewards.append(0.0)
        episode.cut_turns += sampled.finish is Finish.LENGTH
        episode.messages = [*prepared.asked.messages, {"role": "assistant", "content": text}]
        episode.prompt_messages, episode.last_text = prepared.asked_messages, text
        episode.request = replace(episode.request, writer=writer)
        return self._reply(prepared, sampled, message, turn)

    def _reply(self, prepared: Prepared, sampled: Sampled, message: Mapping[str, Any], turn: int) -> dict[str, Any]:
        prompt, tokens = prepared.tokens.tokens.tolist(), sampled.tokens.tolist()
        finish = "length" if sampled.finish is Finish.LENGTH else "stop"
        content = [
            _token_logprob(self._decode([token], False), logprob)
            for token, logprob in zip(tokens, sampled.logprobs.tolist(), strict=True)
        ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else finish,
            "logprobs": {"content": content} if prepared.asked.tells_logprobs else None,
            "token_ids": tokens,
            "token_logprobs": sampled.logprobs.tolist(),
        }
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return {
            "id": f"chatcmpl-{self.episode.request.seed:x}-{turn}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {**counts, "total_tokens": sum(counts.values())},
            "prompt_token_ids": prompt,
        }


def _extends(asked: ChatCall, answered: _Answered) -> bool:
    count = len(answered.messages)
    rest = asked.messages[count:]
    return (
        bool(rest)
        and asked.tools == answered.tools
        and all(message["role"] in _OBSERVED for message in rest)
        and all(map(same, answered.messages, asked.messages[:count]))
    )


def _going_on(
    writer: TurnTemplate, tokens: EpisodeTokens, written: Sequence[Message], rest: Sequence[Message]
) -> EpisodeTokens | None:
    """Return a sample with what was observed behind it; None where the template writes its turns otherwise now."""
    if not writer.splits_behind(rest):
        observed = writer.observation(rest, last_token=int(tokens.tokens[-1]))
        return tokens.with_observation(np.asarray(observed, np.int64))
    whole = np.asarray(writer.opening(written), np.int64)
    if np.array_equal(whole[: tokens.tokens.size], tokens.tokens):
        return tokens.with_observation(whole[tokens.tokens.size :])
    return None


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


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
