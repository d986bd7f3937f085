"""Where a completion ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stops:
    """Tokens and texts that end a completion; both belong to it."""

    tokens: frozenset[int]
    decode: Callable[[Sequence[int]], str] = lambda tokens: ""  # noqa: ARG005 - without texts nothing is decoded
    texts: tuple[str, ...] = ()

    def with_texts(self, texts: Sequence[str]) -> Stops:
        """Return stops at the same tokens and at these texts."""
        return replace(self, texts=tuple(texts))

    def end(self, tokens: Sequence[int], before: int) -> int | None:
        """Return how many tokens the completion has, or None if it goes on.

        Args:
            tokens: All of them so far.
            before: How many were looked at before, and did not end it.
        """
        for place in range(before, len(tokens)):
            if tokens[place] in self.tokens or (self.texts and self._has_text(tokens[: place + 1])):
                return place + 1
        return None

    def _has_text(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.texts)
