"""An episode: what it starts from, where it ends by itself, and what came of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.environments.base import Message
from holdfast.rollout.episodes.calls import Parse
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import Finish

Ended = Literal["done", "turns", "room", "seconds", "cut", "failed_calls", "fault", "aborted"]
"""By its environment, at `max_turns`, at `data.max_length`, at `max_seconds`, by a turn that was cut, at
`max_failed_calls`, by an environment that failed twice, or since nobody wanted it any more."""

Decode = Callable[[list[int], bool], str]
"""Tokens to text; with True, special ones are left out."""


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
    max_failed_calls: int | None = None
    """In a row."""


@dataclass
class Episode:
    """One episode, while it goes on and when it has ended."""

    request: EpisodeRequest
    tokens: EpisodeTokens | None = None
    """Of its last sample; None before its environment has begun."""
    earlier: list[EpisodeTokens] = field(default_factory=list)
    """Its samples before that, where the template writes earlier turns otherwise once another one follows."""
    messages: list[Message] = field(default_factory=list)
    prompt_messages: int = 0
    """Of these, those that it began with."""
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    """The same by turn; what comes at the end is of the last."""
    info: dict[str, float] = field(default_factory=dict)
    called: Counter[str] = field(default_factory=Counter)
    failed_calls: int = 0
    failed_in_a_row: int = 0
    """Of these, the latest, if no call after them was made."""
    cut_turns: int = 0
    waited_seconds: float = 0.0
    """For its environment."""
    attempts: int = 0
    began_at: float = 0.0
    ended: Ended | None = None
    fault: str = ""
    """What the environment did wrong, a clause."""
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

    def count_calls(self, called: Mapping[str, int], failed: int) -> None:
        """Count the calls of a turn.

        Args:
            called: Calls by tool; those of no tool may be missing.
            failed: Calls that could not be made, or whose tool raised.
        """
        self.called.update(called)
        self.failed_calls += failed
        self.failed_in_a_row = self.failed_in_a_row + failed if failed and failed >= sum(called.values()) else 0

    @property
    def finish(self) -> Finish:
        """Why it ended, as a completion's end."""
        match self.ended:
            case "done" | "failed_calls":
                return Finish.STOP
            case "fault":
                return Finish.ERROR
            case "aborted" | None:
                return Finish.ABORT
            case _:
                return Finish.LENGTH
