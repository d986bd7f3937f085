"""The tokens of a completion as people read them: text, log-probability and advantage of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.types import Trajectory

MOST_TOKENS = 2_000
"""Of a completion; what comes after is in no record of this kind."""
_DIGITS = 4


def token_rows(trajectory: Trajectory, prompt_tokens: int, tokenizer: Any) -> list[list[Any]]:
    """Return [text, log-probability in nats, advantage] of each token behind a prompt; [] without a fast tokenizer.

    A character of several tokens stands at the last of them. What the policy did not choose has no log-probability.

    Args:
        trajectory: Prompt and completion.
        prompt_tokens: Length of the prompt.
        tokenizer: Of the run.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    chosen = slice(prompt_tokens, prompt_tokens + MOST_TOKENS)
    texts = _texts(backend, trajectory.tokens[chosen].tolist())
    own = trajectory.loss_mask[chosen].tolist()
    logprobs = trajectory.sampler_logprobs[chosen].tolist()
    advantages = [None] * len(own) if trajectory.advantages is None else trajectory.advantages[chosen].tolist()
    return [
        [text, _short(logprob) if is_own else None, _short(advantage) if is_own else None]
        for text, is_own, logprob, advantage in zip(texts, own, logprobs, advantages, strict=True)
    ]


def _texts(backend: Any, tokens: Sequence[int]) -> Iterator[str]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for token in tokens:
        yield stream.step(backend, token) or ""


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)
