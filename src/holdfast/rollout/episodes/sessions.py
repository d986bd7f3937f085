"""The tokens of one episode's conversations: every completion is trained once, as the tokens that were sampled.

A conversation that goes on from an earlier answer goes on from the tokens of that one, with what was observed behind
them. Any other one begins a sample of its own, as does a second one that goes on from the same answer, and one whose
earlier turns the template writes otherwise now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.environments.base import Message, ToolCall
from holdfast.rollout.engine import Sampled
from holdfast.rollout.episodes.calls import Parse
from holdfast.rollout.episodes.chat_calls import CallRefused
from holdfast.rollout.episodes.episode import Decode, Ended, Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import Finish


class Syntax(NamedTuple):
    """How turns are written and read."""

    writer: TurnTemplate
    parse: Parse | None
    note: str = ""
    """What a user should know of the template, as a sentence."""


@dataclass(eq=False)
class Answered:
    """A conversation up to an answer of the policy."""

    messages: tuple[Message, ...]
    """Those before the answer."""
    answer: Message
    """The answer as it is read when it comes back."""
    written: tuple[Message, ...]
    """All as templates are given them: with the special tokens of what the policy said."""
    prompt_messages: int
    """Messages before the first answer of the sample."""
    tokens: EpisodeTokens
    sample: int
    """Index of the session's sample that its tokens are of."""
    text: str
    """The answer without special tokens."""
    calls: tuple[ToolCall, ...]
    tools: tuple[Mapping[str, Any], ...]
    is_last: bool = True
    """Whether nothing goes on from here yet."""


@dataclass(frozen=True)
class Prepared:
    """A conversation whose next answer can be sampled."""

    messages: tuple[Message, ...]
    written: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    syntax: Syntax
    tokens: EpisodeTokens
    """What the answer follows."""
    sample: int | None
    """The sample that goes on; None where one begins."""
    prompt_messages: int


class Session:
    """The conversations of one episode.

    Args:
        request: The episode.
        decode: Tokens to text; with True, special ones are left out.
        limits: Of an episode.
    """

    def __init__(self, request: EpisodeRequest, decode: Decode, limits: Limits) -> None:
        self.episode = Episode(request)
        self.asked_count = 0
        """Completions that were asked for."""
        self.refused: Ended | None = None
        """The limit at which the last one was refused."""
        self.answered: list[Answered] = []
        self._decode, self._limits = decode, limits
        self._samples: list[EpisodeTokens] = []

    @property
    def has_failed_too_often(self) -> bool:
        """Whether as many calls in a row have failed as may."""
        most = self._limits.max_failed_calls
        return most is not None and self.episode.failed_in_a_row >= most

    def check(self, messages: int, characters: int) -> None:
        """Look at the size of a conversation before it is rendered.

        Raises:
            CallRefused: The episode has no turn or no room left, or as many of its calls failed as may.
        """
        limits = self._limits
        if self.has_failed_too_often:
            self.refused = "failed_calls"
            raise CallRefused(
                f"the last {self.episode.failed_in_a_row} calls of this episode could not be read "
                f"(environment.max_failed_calls={limits.max_failed_calls}); return",
                code="rate_limit_exceeded",
            )
        if self.asked_count >= limits.max_turns:
            self.refused = "turns"
            raise CallRefused(
                f"this episode has had its {limits.max_turns} completions (environment.max_turns); return",
                code="rate_limit_exceeded",
            )
        most = f"more than data.max_length={limits.max_length} tokens can have"
        if characters > limits.max_characters:
            self._refuse_room(f"{characters} characters, {most}")
        if messages > limits.max_length:
            self._refuse_room(f"{messages} messages, {most}")

    def prepare(
        self,
        messages: tuple[Message, ...],
        written: tuple[Message, ...],
        syntax: Syntax,
        *,
        tools: tuple[Mapping[str, Any], ...] = (),
        prompt: NDArray[np.int64] | None = None,
    ) -> Prepared:
        """Return what the first answer of a conversation follows.

        Args:
            messages: [M]
            written: [M], the same as the template is given them.
            syntax: How they are written.
            tools: Schemas of what may be called.
            prompt: [P], the same as tokens; by default what the template makes of them.

        Raises:
            CallRefused: The episode has no room left.
            TemplateRefuses: The template cannot write the messages.
        """
        if prompt is None:
            prompt = np.asarray(syntax.writer.opening(written), np.int64)
        tokens = EpisodeTokens.of_prompt(prompt)
        return self._with_room(Prepared(messages, written, tools, syntax, tokens, None, len(messages)))

    def follow(self, earlier: Answered, rest: tuple[Message, ...], syntax: Syntax) -> Prepared | None:
        """Return what the next answer follows where messages are observed after an earlier one.

        None where the template writes the earlier turns otherwise once another one follows.

        Raises:
            CallRefused: The episode has no room left.
            TemplateRefuses: The template cannot write the messages.
        """
        written = (*earlier.written, *rest)
        tokens = _observed(syntax.writer, earlier.tokens, written, rest)
        if tokens is None:
            return None
        messages = (*earlier.messages, earlier.answer, *rest)
        if not earlier.is_last:
            prompt = EpisodeTokens.of_prompt(tokens.tokens)
            return self._with_room(Prepared(messages, written, earlier.tools, syntax, prompt, None, len(messages)))
        going_on = Prepared(messages, written, earlier.tools, syntax, tokens, earlier.sample, earlier.prompt_messages)
        earlier.is_last = False
        return self._with_room(going_on)

    def complete(self, prepared: Prepared, sampled: Sampled) -> Answered:
        """Take in what was sampled."""
        episode, writer = self.episode, prepared.syntax.writer
        tokens = prepared.tokens.with_turn(sampled)
        if prepared.sample is None:
            sample = len(self._samples)
            self._samples.append(tokens)
        else:
            sample = prepared.sample
            self._samples[sample] = tokens
        said = sampled.tokens.tolist()
        text = self._decode(said, True)
        written = self._decode(said[:-1] if said and writer.is_end(said[-1]) else said, False)
        answer = {"role": "assistant", "content": text}
        answered = Answered(
            messages=prepared.messages,
            answer=answer,
            written=(*prepared.written, {"role": "assistant", "content": written}),
            prompt_messages=prepared.prompt_messages,
            tokens=tokens,
            sample=sample,
            text=text,
            calls=() if prepared.syntax.parse is None else prepared.syntax.parse(written),
            tools=prepared.tools,
        )
        self.answered.append(answered)
        episode.earlier, episode.tokens = self._samples[:-1], self._samples[-1]
        episode.messages, episode.last_text = [*prepared.messages, answer], text
        episode.turn_rewards.append(0.0)
        episode.cut_turns += sampled.finish is Finish.LENGTH
        return answered

    def _with_room(self, prepared: Prepared) -> Prepared:
        size, limits = prepared.tokens.tokens.size, self._limits
        if size + limits.max_new_tokens > limits.max_length:
            self._refuse_room(
                f"{size} tokens, and data.max_length={limits.max_length} leaves no room for a completion of "
                f"{limits.max_new_tokens}"
            )
        self.asked_count, self.refused = self.asked_count + 1, None
        return prepared

    def _refuse_room(self, what: str) -> NoReturn:
        self.refused = "room"
        raise CallRefused(f"the conversation has {what}", code="context_length_exceeded")


def _observed(
    writer: TurnTemplate, tokens: EpisodeTokens, written: Sequence[Message], rest: Sequence[Message]
) -> EpisodeTokens | None:
    """Return a sample with what was observed behind it; None where the template writes its turns otherwise now."""
    if not writer.splits_behind(rest):
        last_token = int(tokens.tokens[-1]) if tokens.sampled[-1] else None
        return tokens.with_observation(np.asarray(writer.observation(rest, last_token=last_token), np.int64))
    whole = np.asarray(writer.opening(written), np.int64)
    if np.array_equal(whole[: tokens.tokens.size], tokens.tokens):
        return tokens.with_observation(whole[tokens.tokens.size :])
    return None
