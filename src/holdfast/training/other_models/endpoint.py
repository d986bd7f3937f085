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
from holdfast.http import Endpoint, EndpointRefuses, api_key
from holdfast.responses import Field, first_choice

_MODELS, _COMPLETIONS = "/models", "/completions"
"""Routes whose answers are read."""
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
    logprobs: list[float]
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
        listed = Field(_MODELS, self.endpoint.ask("GET", _MODELS)).key("data").items()
        return [ServedModel(item.key("id").text(), _length(item.key("max_model_len"))) for item in listed]

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return [L], the log-probability of every token after those before it; NaN for the first.

        Raises:
            EndpointRefuses: The answer is short, speaks of other tokens, or holds what is not a log-probability.
            EndpointUnwell: There is no answer, however often it was asked for.
        """
        scores = self._scores_of(list(tokens), {}, len(tokens))
        if len(scores.tokens) != len(tokens):
            raise EndpointRefuses(f"answers of {len(scores.tokens)} tokens where {len(tokens)} were sent")
        for index, (sent, token_id) in enumerate(zip(tokens, scores.tokens, strict=True)):
            if token_id is not None and token_id != sent:
                raise EndpointRefuses(f"answers of token {token_id} where token {sent} was sent (place {index})")
        return np.array(scores.logprobs)

    def tokens_of(self, text: str) -> list[int | None]:
        """Return the tokens that the endpoint makes of a text; None where it does not say which.

        Raises:
            EndpointRefuses, EndpointUnwell: As `logprobs`.
        """
        return self._scores_of(text, {"add_special_tokens": False}, None).tokens

    def _scores_of(self, prompt: list[int] | str, more: dict[str, Any], length: int | None) -> _TokenScores:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "n": 1}
        answer = self.endpoint.ask("POST", _COMPLETIONS, body | _ASKED[self.section.answers] | more)
        choice = first_choice(_COMPLETIONS, answer)
        if self.section.answers == "prompt_logprobs":
            return _of_prompt_logprobs(choice.key("prompt_logprobs"), prompt if isinstance(prompt, list) else [])
        return _of_echo(choice.key("logprobs"), _counted(Field(_COMPLETIONS, answer)) if length is None else length)


def _counted(answer: Field) -> int | None:
    """Return the number of a prompt's tokens; None where the endpoint does not say."""
    usage = answer.key("usage")
    return None if usage.is_absent else _length(usage.key("prompt_tokens"))


def _of_prompt_logprobs(positions: Field, sent: Sequence[int]) -> _TokenScores:
    """Read vLLM's form: per token an object of id to log-probability, the token's own first; null at index 0."""
    tokens: list[int | None] = [None]
    logprobs = [math.nan]
    for index, row in enumerate(positions.prompt_rows(None), start=1):
        token = sent[index] if index < len(sent) and sent[index] in row else next(iter(row))
        tokens.append(token)
        logprobs.append(row[token])
    return _TokenScores(tokens, logprobs)


def _of_echo(scores: Field, length: int | None) -> _TokenScores:
    """Read the older form: parallel lists, with the token that was generated at the end."""
    names, values = scores.key("tokens").items(1), scores.key("token_logprobs").items(1)
    if len(names) != len(values):
        scores.key("token_logprobs").refuse(f"a list of {len(names)}, like the tokens,")
    tokens, logprobs = names[:length], values[1:length]
    return _TokenScores([_token(name) for name in tokens], [math.nan, *(value.logprob() for value in logprobs)])


def _token(name: Field) -> int | None:
    """Return the id that names a token; None where its text does, which several tokens may share."""
    text = name.text_or_empty()
    return name._replace(value=text.removeprefix(_ID)).written_token() if text.startswith(_ID) else None


def _length(field: Field) -> int | None:
    """Return a number of tokens; None where a server says none."""
    return None if field.is_absent else field.positive()
