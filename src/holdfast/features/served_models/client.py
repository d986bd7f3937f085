"""A client of an OpenAI-compatible endpoint that tells the log-probabilities of given tokens, at temperature 1.

An answer is accepted only if it has one finite number for each token, and names the tokens that were sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.server import ServerConfig
from holdfast.http import Endpoint, EndpointRefuses, api_key
from holdfast.responses import Field, first_choice

_MODELS, _COMPLETIONS = "/models", "/completions"
_ASKED: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    # Without the last key vLLM names tokens by their text, which several tokens may share.
    "echo": {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": True},
}
_ID = "token_id:"


class Told(NamedTuple):
    """An endpoint's answer about one text."""

    tokens: list[int | None]
    """None where a token is named by its text, which several tokens may share."""
    logprobs: list[float]
    """NaN for the first token, which nothing predicts."""


@dataclass(frozen=True)
class Client:
    """A client of one model of an endpoint; safe to share between threads."""

    section: ServerConfig
    endpoint: Endpoint
    model: str

    @classmethod
    def of(cls, section: ServerConfig, name: str) -> Client:
        """Return the client of the endpoint that the section of this name describes.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        key = api_key(section.api_key_variable, name)
        endpoint = Endpoint(section.url, key, section.timeout_seconds, section.attempts)
        return cls(section, endpoint, section.model or "")

    def models(self) -> list[tuple[str, int | None]]:
        """Return the name of each served model and the tokens of its context, None where the endpoint does not say.

        Raises:
            EndpointRefuses, EndpointUnwell: There is no list of models.
        """
        listed = Field(_MODELS, self.endpoint.ask("GET", _MODELS)).key("data").items()
        return [(item.key("id").text(), _count(item.key("max_model_len"))) for item in listed]

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return [L], the log-probability of every token after those before it; NaN for the first.

        Raises:
            EndpointRefuses: The answer is short, speaks of other tokens, or holds what is not a log-probability.
            EndpointUnwell: There is no answer, however often it was asked for.
        """
        told = self._told(list(tokens))
        if len(told.tokens) != len(tokens):
            raise EndpointRefuses(f"answers of {len(told.tokens)} tokens where {len(tokens)} were sent")
        for place, (sent, token) in enumerate(zip(tokens, told.tokens, strict=True)):
            if token not in {None, sent}:
                raise EndpointRefuses(f"answers of token {token} where token {sent} was sent (place {place})")
        return np.array(told.logprobs)

    def tokens_of(self, text: str) -> list[int | None]:
        """Return the tokens that the endpoint makes of a text; None where it does not say which.

        Raises:
            EndpointRefuses, EndpointUnwell: As `logprobs`.
        """
        return self._told(text).tokens

    def _told(self, prompt: list[int] | str) -> Told:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "n": 1}
        if isinstance(prompt, str):
            body["add_special_tokens"] = False
        answer = self.endpoint.ask("POST", _COMPLETIONS, body | _ASKED[self.section.answers])
        choice = first_choice(_COMPLETIONS, answer)
        if self.section.answers == "prompt_logprobs":
            return _of_prompt_logprobs(choice.key("prompt_logprobs"), [] if isinstance(prompt, str) else prompt)
        if isinstance(prompt, list):
            return _of_echo(choice.key("logprobs"), len(prompt))
        usage = Field(_COMPLETIONS, answer).key("usage")
        return _of_echo(choice.key("logprobs"), None if usage.is_absent else _count(usage.key("prompt_tokens")))


def _of_prompt_logprobs(positions: Field, sent: Sequence[int]) -> Told:
    """Read vLLM's form: per token an object of id to log-probability, the token's own first; null at index 0."""
    tokens: list[int | None] = [None]
    logprobs = [math.nan]
    for place, row in enumerate(positions.prompt_rows(None), start=1):
        token = sent[place] if place < len(sent) and sent[place] in row else next(iter(row))
        tokens.append(token)
        logprobs.append(row[token])
    return Told(tokens, logprobs)


def _of_echo(scores: Field, length: int | None) -> Told:
    """Read the older form: parallel lists of `length` tokens, with the token that was generated at the end."""
    names, values = scores.key("tokens").items(1), scores.key("token_logprobs").items(1)
    if len(names) != len(values):
        scores.key("token_logprobs").refuse(f"a list of {len(names)}, like the tokens,")
    return Told([_token(name) for name in names[:length]], [math.nan, *(each.logprob() for each in values[1:length])])


def _token(name: Field) -> int | None:
    """Return the id that names a token; None where its text does."""
    text = name.text_or_empty()
    return name._replace(value=text.removeprefix(_ID)).written_token() if text.startswith(_ID) else None


def _count(field: Field) -> int | None:
    """Return a number of tokens; None where there is none."""
    return None if field.is_absent else field.positive()
