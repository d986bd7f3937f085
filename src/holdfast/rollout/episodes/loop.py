"""The loop of turns: what is sampled goes to environments, and what they answer to the engine, episode by episode.

No episode waits for another one's turn. Where environments are replayable and this process samples, an answer is
waited for before the next token is sampled: then what is decoded together follows from tokens alone, and a step that is
made again is the same.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.tokens.chat_template import TemplateRefuses
from holdfast.environments.base import APPENDED, Message, StepResult, Turn, extent_of
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.episodes.calls import Parse
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.rollout.sampling import mixed
from holdfast.types import Finish

Ended = Literal["done", "turns", "room", "seconds", "cut", "fault", "aborted"]
"""By its environment, at `max_turns`, at `data.max_length`, at `max_seconds`, by a turn that was cut, by an environment
that failed twice, or since nobody wanted it any more."""

Decode = Callable[[list[int], bool], str]
"""Tokens to text; with True, special ones are left out."""

ATTEMPTS = 2
"""An environment that fails is made once more: what ended it may not be its episode's doing."""
_LOOK_SECONDS = 0.2
"""Between two looks whether the step is abandoned, where an environment is waited for."""


@dataclass(frozen=True)
class EpisodeRequest:
    """What an episode starts from."""

    prompt_id: int
    place: int
    """Which of the prompt's episodes."""
    seed: int
    messages: Sequence[Message]
    """The row's prompt."""
    prompt: NDArray[np.int64]
    """[P], the same as tokens"""
    row: Mapping[str, Any]
    writer: TurnTemplate
    """Writes its prompt and observations."""
    parse: Parse | None
    """Reads calls; None without tools."""


@dataclass(frozen=True)
class Limits:
    """Where an episode ends by itself."""

    max_turns: int
    max_length: int
    """Tokens of an episode."""
    max_new_tokens: int
    """Tokens of a turn, which begins where so many are left."""
    max_seconds: float | None
    ends_when_cut: bool
    instances: int
    max_characters: int = sys.maxsize
    """That `max_length` tokens can have: a conversation with more is not rendered."""


@dataclass
class Episode:
    """One episode, while it goes on and when it has ended."""

    request: EpisodeRequest
    tokens: EpisodeTokens | None = None
    """Of its last sample; None before its environment has begun."""
    earlier: list[EpisodeTokens] = field(default_factory=list)
    """Its samples before that, where the template writes earlier turns otherwise once another one follows."""
    written: list[Message] = field(default_factory=list)
    """Its messages as the template is given them: with the special tokens of what the policy said."""
    messages: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    """Of these, those that it began with."""
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """The same by turn; what comes at the end is of the last."""
    info: dict[str, float] = field(default_factory=dict)
    called: Counter[str] = field(default_factory=Counter)
    failed_calls: int = 0
    cut_turns: int = 0
    waited_seconds: float = 0.0
    """For its environment."""
    attempts: int = 0
    began_at: float = 0.0
    ended: Ended | None = None
    fault: str = ""
    """What the environment did wrong, a clause."""
    last_token: int | None = None
    last_text: str = ""
    """What the policy said last, whatever its environment said after it."""

    @property
    def samples(self) -> list[EpisodeTokens]:
        """All samples, in order; none before its environment has begun."""
        return [] if self.tokens is None else [*self.earlier, self.tokens]

    @property
    def turn_count(self) -> int:
        """Turns that the policy took."""
        return sum(sample.turn_count for sample in self.samples)

    @property
    def finish(self) -> Finish:
        """Why it ended, as a completion's end."""
        match self.ended:
            case "done":
                return Finish.STOP
            case "fault":
                return Finish.ERROR
            case "aborted" | None:
                return Finish.ABORT
            case _:
                return Finish.LENGTH


class EpisodeLoop:
    """Implements `TurnSource`: hands out the turns that can be sampled, and takes them back.

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
        self._in_order = in_order and environments.replayable
        self.episodes = [Episode(request) for request in requests]
        self._environments, self._decode = environments, decode
        self._limits, self._interrupted = limits, interrupted
        self._waiting = deque(range(len(self.episodes)))
        self._asked: set[int] = set()
        """Episodes whose environment is at work."""
        self._active: set[int] = set()
        self._sampling: dict[tuple[int, int], int] = {}
        """(request id, place) of a turn under way -> its episode."""
        self._able: list[int] = []
        """Episodes whose next turn can be sampled."""
        self._request_count = 0
        # What an abandoned step asked for may still be answered: numbers are of one episode for good.
        self._first = environments.reserve(len(requests))

    def ready(self, *, wait: bool) -> list[Request]:
        """Return the turns that can be sampled now.

        Args:
            wait: Nothing else is to be done: return nothing only where nothing is left.
        """
        self._begin_waiting()
        while self._asked and not self._interrupted():
            must_wait = self._in_order or (wait and not self._able)
            answers = self._environments.answers(_LOOK_SECONDS if must_wait else 0.0)
            for answer in sorted(answers, key=lambda answer: answer.episode):
                self._hear(answer)
            self._begin_waiting()
            if not must_wait and not answers:
                break
        if self._interrupted():
            self.abandon()
        return self._requests()

    def finished(self, sampled: Sequence[Sampled]) -> None:
        """Take turns that have been sampled, and ask environments what comes of them."""
        for completion in sampled:
            index = self._sampling.pop((completion.request_id, completion.place))
            episode = self.episodes[index]
            assert episode.tokens is not None
            episode.tokens = episode.tokens.with_turn(completion)
            episode.turn_rewards.append(0.0)
            episode.last_token = int(completion.tokens[-1]) if completion.tokens.size else None
            if completion.finish is Finish.ABORT:
                self._end(index, "aborted")
                continue
            is_cut = completion.finish is Finish.LENGTH
            episode.cut_turns += is_cut
            said = completion.tokens.tolist()
            text = self._decode(said, True)
            episode.messages.append({"role": "assistant", "content": text})
            episode.last_text = text
            if is_cut and self._limits.ends_when_cut:
                self._end(index, "cut")
                continue
            written = self._decode(said[:-1] if said and episode.request.writer.is_end(said[-1]) else said, False)
            episode.written.append({"role": "assistant", "content": written})
            parse = episode.request.parse
            calls = () if parse is None else parse(written)
            turn = Turn(episode.turn_count - 1, text, calls, completion.finish.value)
            self._environments.take(self._first + index, turn)
            self._asked.add(index)

    def abandon(self) -> None:
        """End every episode, those that wait for their final reward included: nobody wants them any more."""
        for index in sorted(self._active | set(self._waiting)):
            self.episodes[index].ended = "aborted"
            self._leave(index)
        self._waiting.clear()
        self._able.clear()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._active) < self._limits.instances:
            self._begin(self._waiting.popleft())

    def _begin(self, index: int) -> None:
        request, attempts = self.episodes[index].request, self.episodes[index].attempts
        waited = self.episodes[index].waited_seconds
        self.episodes[index] = Episode(request, attempts=attempts + 1, waited_seconds=waited)
        self._active.add(index)
        self._asked.add(index)
        self._environments.begin(self._first + index, request.row, request.seed)

    def _requests(self) -> list[Request]:
        """Return the turns of episodes that are able, those of one prompt together."""
        by_prompt: dict[bytes, list[int]] = {}
        for index in sorted(self._able):
            by_prompt.setdefault(self._tokens(index).tobytes(), []).append(index)
        self._able = []
        requests = []
        for indices in by_prompt.values():
            number, self._request_count = self._request_count, self._request_count + 1
            self._sampling |= {(number, place): index for place, index in enumerate(indices)}
            requests.append(Request(number, self._tokens(indices[0]), tuple(map(self._seed_of_turn, indices))))
        return requests

    def _tokens(self, index: int) -> NDArray[np.int64]:
        tokens = self.episodes[index].tokens
        assert tokens is not None
        return tokens.tokens

    def _seed_of_turn(self, index: int) -> int:
        """Return the seed of an episode's next turn; that of the first is the episode's."""
        episode = self.episodes[index]
        turn = episode.turn_count
        return mixed(episode.request.seed, turn) if turn else episode.request.seed

    def _hear(self, answer: Answer) -> None:
        index = answer.episode - self._first
        if index not in self._asked:
            return
        episode = self.episodes[index]
        self._asked.discard(index)
        episode.waited_seconds += answer.seconds
        if answer.result is None:
            self._failed(index, answer)
            return
        try:
            self._heard(index, answer.result)
        except TemplateRefuses as refusal:
            self._failed(
                index, Answer(index, 0.0, None, "malformed", f"said what the template cannot write: {refusal}")
            )

    def _failed(self, index: int, answer: Answer) -> None:
        episode = self.episodes[index]
        self._leave(index)
        if episode.attempts < ATTEMPTS:
            self._begin(index)
            return
        episode.fault, episode.ended = answer.message, "fault"

    def _heard(self, index: int, result: StepResult) -> None:
        episode = self.episodes[index]
        if episode.tokens is None:
            self._start(index, result.messages)
            return
        episode.reward += result.reward
        if episode.turn_rewards:
            episode.turn_rewards[-1] += result.reward
        episode.info |= result.info
        episode.called.update(result.called)
        episode.failed_calls += result.failed_calls
        is_too_long = self._is_too_long(result.messages)
        said = _shortened(result.messages, self._limits.max_characters) if is_too_long else result.messages
        episode.messages += said
        episode.written += said
        if episode.ended is not None or result.done:
            episode.ended = episode.ended or "done"
            self._leave(index)
        elif episode.turn_count >= self._limits.max_turns:
            self._end(index, "turns")
        elif is_too_long:
            self._end(index, "room")
        else:
            self._go_on(index, _observed(episode, episode.tokens, result.messages))

    def _is_too_long(self, messages: Sequence[Message]) -> bool:
        characters = extent_of([[*message.values()] for message in messages]).characters
        return len(messages) > self._limits.max_length or characters > self._limits.max_characters

    def _start(self, index: int, messages: Sequence[Message]) -> None:
        episode = self.episodes[index]
        if self._is_too_long(messages):
            raise TemplateRefuses(f"more than data.max_length={self._limits.max_length} tokens can have")
        episode.began_at = time.monotonic()
        episode.messages = with_begun(episode.request.messages, messages)
        episode.prompt_messages, episode.written = len(episode.messages), [*episode.messages]
        prompt = episode.request.prompt
        if messages:
            prompt = np.asarray(episode.request.writer.opening(episode.messages), np.int64)
        episode.tokens = EpisodeTokens.of_prompt(prompt)
        self._go_on(index, episode.tokens)

    def _go_on(self, index: int, tokens: EpisodeTokens) -> None:
        """Let an episode take another turn, if there is room and time for one."""
        episode, limits = self.episodes[index], self._limits
        if tokens.tokens.size + limits.max_new_tokens > limits.max_length:
            self._end(index, "room")
        elif limits.max_seconds is not None and time.monotonic() - episode.began_at > limits.max_seconds:
            self._end(index, "seconds")
        else:
            if episode.tokens is not None and tokens.turn_count < episode.tokens.turn_count:
                episode.earlier.append(episode.tokens)
            episode.tokens = tokens
            self._able.append(index)

    def _end(self, index: int, ended: Ended) -> None:
        """End an episode otherwise than by its environment, which may still have a reward for it."""
        self.episodes[index].ended = ended
        if ended == "aborted":
            self._leave(index)
            return
        self._environments.finish(self._first + index)
        self._asked.add(index)

    def _leave(self, index: int) -> None:
        if index in self._active:
            self._environments.leave(self._first + index)
        self._active.discard(index)
        self._asked.discard(index)


def _observed(episode: Episode, tokens: EpisodeTokens, messages: Sequence[Message]) -> EpisodeTokens:
    """Return what another turn follows: the sample with what was observed, or the prompt of a new one."""
    writer = episode.request.writer
    if not writer.splits_behind(messages):
        observed = writer.observation(messages, last_token=episode.last_token)
        return tokens.with_observation(np.asarray(observed, np.int64))
    whole = np.asarray(writer.opening(episode.written), np.int64)
    if np.array_equal(whole[: tokens.tokens.size], tokens.tokens):
        return tokens.with_observation(whole[tokens.tokens.size :])
    return EpisodeTokens.of_prompt(whole)


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
