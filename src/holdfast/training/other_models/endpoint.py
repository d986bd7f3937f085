"""Log-probabilities of given tokens from an OpenAI-compatible endpoint, at temperature 1.

An answer is accepted only if it has one finite number for each token, and names the tokens that were sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.server import ServerConfig
from holdfast.http import Endpoint, EndpointRefuses, api_key, cut

_NO_NUMBER = -9999.0
"""Value that vLLM returns for minus infinity, which JSON cannot represent."""
_ABOVE_ZERO = 1e-3
"""Largest positive log-probability that is accepted as rounding of 0."""
_ASKED: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    # Without the last key vLLM names tokens by their text, which several tokens may share.
    "echo": {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": True},
}
_ID = "token_id:"


class ServedModel(NamedTuple):
    """A model that an endpoint offers."""

    name: str
    longest: int | None
    """Tokens of its context; None if the endpoint does not say."""


class _TokenScores(NamedTuple):
    tokens: list[int | None]
    """None where the endpoint does not say."""
    logprobs: NDArray[np.float64]
    """NaN for the first token, which nothing predicts."""


@dataclass(frozen=True)
class CompletionServer:
    """Client of one endpoint and one of its models; safe to share between threads."""

    section: ServerConfig
    model: str
    endpoint: Endpoint

    @classmethod
    def of(cls, section: ServerConfig, name: str) -> CompletionServer:
        """Return the endpoint that a section of this name describes.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        key = api_key(section.api_key_variable, name)
        return cls(section, section.model or "", Endpoint(section.url, key, section.timeout_seconds, section.attempts))

    def named(self, model: str) -> CompletionServer:
        """Return the same endpoint, asked for another of its models."""
        return replace(self, model=model)

    def models(self) -> list[ServedModel]:
        """Return what the endpoint offers.

        Raises:
            EndpointRefuses, EndpointUnwell: There is no list of models.
        """
        listed = self.endpoint.ask("GET", "/models")
        try:
            models = [ServedModel(str(item["id"]), _length(item.get("max_model_len"))) for item in listed["data"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise EndpointRefuses(f"GET {self.section.url}/models answers no list of models: {cut(listed)}") from error
        return models

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return [L], the log-probability of every token after those before it; NaN for the first.

        Raises:
            EndpointRefuses: The answer is short, speaks of other tokens, or holds what is not a log-probability.
            EndpointUnwell: There is no answer, however often it was asked for.
        """
        scores = self._scores_of(list(tokens), {}, len(tokens))
        for index, (sent, token_id) in enumerate(zip(tokens, scores.tokens, strict=True)):
            if token_id is not None and token_id != sent:
                raise EndpointRefuses(f"answers of token {token_id} where token {sent} was sent (place {index})")
        for index, value in enumerate(scores.logprobs.tolist()):
            if index and not _NO_NUMBER < value < _ABOVE_ZERO:
                raise EndpointRefuses(f"says {value} of token {tokens[index]} (place {index}): no log-probability")
        return scores.logprobs

    def tokens_of(self, text: str) -> list[int | None]:
        """Return the tokens that the endpoint makes of a text; None where it does not say which.

        Raises:
            EndpointRefuses, EndpointUnwell: As `logprobs`.
        """
        return self._scores_of(text, {"add_special_tokens": False}, None).tokens

    def _scores_of(self, prompt: list[int] | str, more: dict[str, Any], length: int | None) -> _TokenScores:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "n": 1}
        answer = self.endpoint.ask("POST", "/completions", body | _ASKED[self.section.answers] | more)
        try:
            choice = answer["choices"][0]
            if self.section.answers == "echo":
                usage = answer.get("usage") or {}
                scores = _of_echo(choice["logprobs"], usage.get("prompt_tokens") if length is None else length)
            else:
                scores = _of_prompt_logprobs(choice["prompt_logprobs"], prompt if isinstance(prompt, list) else None)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EndpointRefuses(f"answers no log-probabilities of what was sent: {cut(answer)}") from error
        if length is not None and len(scores.logprobs) != length:
            raise EndpointRefuses(f"answers of {len(scores.logprobs)} tokens where {length} were sent")
        return scores


def _of_prompt_logprobs(entries: Sequence[dict[str, Any] | None], sent: Sequence[int] | None) -> _TokenScores:
    """Read vLLM's own form: per token a dict of id to log-probability, which holds the token first; null at place 0."""
    tokens: list[int | None] = [None]
    numbers = [math.nan]
    for index, entry in enumerate(entries[1:], start=1):
        if entry is None:
            raise ValueError(index)
        token_id = next(iter(entry), "") if sent is None or str(sent[index]) not in entry else str(sent[index])
        tokens.append(int(token_id))
        numbers.append(_number(entry[token_id]["logprob"]))
    return _TokenScores(tokens[: len(entries)], np.array(numbers[: len(entries)]))


def _of_echo(logprobs: dict[str, Any], length: int | None) -> _TokenScores:
    """Read the older form: parallel lists, with the token that was made at the end."""
    numbers, token_names = logprobs["token_logprobs"][:length], logprobs["tokens"][:length]
    tokens = [int(token_name.removeprefix(_ID)) if token_name.startswith(_ID) else None for token_name in token_names]
    values = [math.nan if index == 0 else _number(value) for index, value in enumerate(numbers)]
    if len(tokens) != len(values):
        raise ValueError(len(tokens))
    return _TokenScores(tokens, np.array(values))


def _number(value: object) -> float:
    """Return a number as it is, and NaN for anything else, which is refused where it is read."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _length(answer: Any) -> int | None:
    """Return a number of tokens; None where a server says none, or something else."""
    return answer if isinstance(answer, int) and not isinstance(answer, bool) else None
