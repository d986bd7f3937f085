"""The tokens of an episode, with all that belongs to a token: one structure, so that nothing can slip.

Tokens that the policy sampled are never decoded and encoded again, whatever stands between the turns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.rollout.engine import Sampled


@dataclass(frozen=True)
class EpisodeTokens:
    """A prompt, and turns of the policy with what was observed after each. L counts all of them."""

    tokens: NDArray[np.int64]
    """[L]"""
    sampled: NDArray[np.bool_]
    """[L], True where the policy chose the token; nothing else is trained"""
    logprobs: NDArray[np.float32]
    """[L], of the engine; 0 where the policy did not choose"""
    weights_versions: NDArray[np.int32]
    """[L], which weights chose the token; -1 where none did"""
    turns: NDArray[np.int32]
    """[L], the turn that the token is of, or is observed after; -1 in the prompt"""

    def __post_init__(self) -> None:
        """Refuse columns of different lengths or types, and numbers of tokens that nobody chose."""
        for column in fields(self):
            values, dtype = getattr(self, column.name), _DTYPES[column.name]
            if values.shape != self.tokens.shape or values.ndim != 1 or values.dtype != dtype:
                raise ValueError(
                    f"{column.name} is {values.dtype} {list(values.shape)} for {self.tokens.size} tokens; it should be "
                    f"{np.dtype(dtype)} [{self.tokens.size}]"
                )
        observed = ~self.sampled
        if np.any(self.logprobs[observed] != 0) or np.any(self.weights_versions[observed] != -1):
            raise ValueError("a token that the policy did not choose has a log-probability or a weights version")
        if self.tokens.size == 0 or self.sampled[0]:
            raise ValueError("an episode begins with a prompt")

    @classmethod
    def of_prompt(cls, tokens: NDArray[np.int64]) -> EpisodeTokens:
        """Return an episode before its first turn."""
        return _observed(tokens, -1)

    @property
    def turn_count(self) -> int:
        """Turns that the policy took."""
        return int(self.turns[-1]) + 1

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Tokens that the policy chose in each turn."""
        return tuple(np.bincount(self.turns[self.sampled], minlength=self.turn_count).tolist())

    def with_turn(self, sampled: Sampled) -> EpisodeTokens:
        """Return the episode with what the policy chose next, token by token as the engine gave it."""
        size = sampled.tokens.size
        versions = np.full(size, sampled.weights_version, np.int32)
        for start, version in sampled.segments:
            versions[start:] = version
        turn = np.full(size, self.turn_count, np.int32)
        chosen = _Columns(sampled.tokens, np.ones(size, np.bool_), sampled.logprobs, versions, turn)
        return self._with(chosen)

    def with_observation(self, tokens: NDArray[np.int64]) -> EpisodeTokens:
        """Return the episode with tokens that nobody chose behind its last turn."""
        return self._with(_observed(tokens, self.turn_count - 1)) if tokens.size else self

    def _with(self, more: EpisodeTokens | _Columns) -> EpisodeTokens:
        return EpisodeTokens(
            *(np.concatenate([getattr(self, name), getattr(more, name)]) for name in _DTYPES),
        )


_DTYPES: dict[str, Any] = {
    "tokens": np.int64,
    "sampled": np.bool_,
    "logprobs": np.float32,
    "weights_versions": np.int32,
    "turns": np.int32,
}


@dataclass(frozen=True)
class _Columns:
    """Columns as those of `EpisodeTokens`, before they follow a prompt."""

    tokens: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    weights_versions: NDArray[np.int32]
    turns: NDArray[np.int32]


def _observed(tokens: NDArray[np.int64], turn: int) -> EpisodeTokens:
    size = tokens.size
    return EpisodeTokens(
        tokens,
        np.zeros(size, np.bool_),
        np.zeros(size, np.float32),
        np.full(size, -1, np.int32),
        np.full(size, turn, np.int32),
    )
