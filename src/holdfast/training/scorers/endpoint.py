"""What an OpenAI-compatible endpoint says of tokens that are given to it: their log-probabilities, at temperature 1.

An answer counts only if it is whole: one finite number for each token, and of the tokens that were sent.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np
import tenacity
from numpy.typing import NDArray

from holdfast.config.sections.server import ServerConfig
from holdfast.errors import ConfigError

_TRIED_AGAIN = frozenset({408, 409, 429})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 4.0
_SHOWN = 200
_NO_NUMBER = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""
_ABOVE_ZERO = 1e-3
"""How far rounding may bring the log-probability of a sure token above 0."""
_ASKED: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    # Without the last key vLLM names tokens by their text, which several tokens may share.
    "echo": {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": True},
}
_ID = "token_id:"


class ServerRefuses(Exception):  # noqa: N818 - the name says what happened
    """The answer is not what was asked for, and asking again would not help."""


class ServerUnwell(Exception):  # noqa: N818 - the name says what happened
    """The endpoint cannot be reached or is overloaded; it may be well in a moment."""


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
    """Asks one endpoint; safe to share between threads."""

    section: ServerConfig
    model: str
    key: str | None
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set it, and requests that wait to be tried again are tried no more."""

    @classmethod
    def of(cls, section: ServerConfig, name: str) -> CompletionServer:
        """Return the endpoint that a section of this name describes.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        return cls(section, section.model or "", _key(section.api_key_variable, name))

    def named(self, model: str) -> CompletionServer:
        """Return the same endpoint, asked for another of its models."""
        return replace(self, model=model)

    def models(self) -> list[ServedModel]:
        """Return what the endpoint offers.

        Raises:
            ServerRefuses, ServerUnwell: There is no list of models.
        """
        listed = self._ask("GET", "/models")
        try:
            models = [ServedModel(str(item["id"]), _length(item.get("max_model_len"))) for item in listed["data"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerRefuses(f"GET {self.section.url}/models answers no list of models: {_cut(listed)}") from error
        return models

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return [L], the log-probability of every token after those before it; NaN for the first.

        Raises:
            ServerRefuses: The answer is short, speaks of other tokens, or holds what is no log-probability.
            ServerUnwell: There is no answer, however often it was asked for.
        """
        scores = self._scores_of(list(tokens), {}, len(tokens))
        for place, (sent, named) in enumerate(zip(tokens, scores.tokens, strict=True)):
            if named is not None and named != sent:
                raise ServerRefuses(f"answers of token {named} where token {sent} was sent (place {place})")
        for place, value in enumerate(scores.logprobs.tolist()):
            if place and not _NO_NUMBER < value < _ABOVE_ZERO:
                raise ServerRefuses(f"says {value} of token {tokens[place]} (place {place}): no log-probability")
        return scores.logprobs

    def tokens_of(self, text: str) -> list[int | None]:
        """Return the tokens that the endpoint makes of a text; None where it does not say which.

        Raises:
            ServerRefuses, ServerUnwell: As `logprobs`.
        """
        return self._scores_of(text, {"add_special_tokens": False}, None).tokens

    def _scores_of(self, prompt: list[int] | str, more: dict[str, Any], length: int | None) -> _TokenScores:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "n": 1}
        answer = self._ask("POST", "/completions", asked | _ASKED[self.section.answers] | more)
        try:
            choice = answer["choices"][0]
            if self.section.answers == "echo":
                usage = answer.get("usage") or {}
                scores = _of_echo(choice["logprobs"], usage.get("prompt_tokens") if length is None else length)
            else:
                scores = _of_prompt_logprobs(choice["prompt_logprobs"], prompt if isinstance(prompt, list) else None)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ServerRefuses(f"answers no log-probabilities of what was sent: {_cut(answer)}") from error
        if length is not None and len(scores.logprobs) != length:
            raise ServerRefuses(f"answers of {len(scores.logprobs)} tokens where {length} were sent")
        return scores

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        """Return what the endpoint answers, asking again where that may help."""
        again = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(self.section.attempts), tenacity.stop_when_event_set(self.given_up)
            ),
            wait=tenacity.wait_exponential(_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS),
            sleep=tenacity.sleep_using_event(self.given_up),
            retry=tenacity.retry_if_exception_type(ServerUnwell),
            reraise=True,
        )
        return again(self._once, method, path, content)

    def _exchange(
        self, method: str, place: SplitResult, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        began, seconds = time.monotonic(), self.section.timeout_seconds
        late = f"gave no whole answer within {seconds:g} s"
        try:
            connection = _connection(place, seconds)
            # A time-out of the socket is one of each read: an endpoint that sends a byte now and then never meets it.
            alarm = threading.Timer(max(0.0, began + seconds - time.monotonic()), _hang_up, (connection.sock,))
            alarm.daemon = True
            alarm.start()
            try:
                connection.request(method, place.path, body, headers)
                response = connection.getresponse()
                received = response.read()
            finally:
                alarm.cancel()
                connection.close()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            is_late = time.monotonic() - began >= seconds
            raise ServerUnwell(late if is_late else f"cannot be reached ({_cut(error)})") from error
        if time.monotonic() - began >= seconds:  # what came may be the part before the alarm
            raise ServerUnwell(late)
        return response.status, received

    def _once(self, method: str, path: str, content: Any) -> Any:
        place = urlsplit(self.section.url.rstrip("/") + path)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        body = None if content is None else json.dumps(content).encode()
        status, received = self._exchange(method, place, body, headers)
        if status in _TRIED_AGAIN or status >= 500:
            raise ServerUnwell(f"answers {status} {_cut(received)}")
        if status != 200:
            raise ServerRefuses(f"answers {status} {_cut(received)}")
        try:
            return json.loads(received)
        except ValueError as error:
            raise ServerRefuses(f"answers what is no JSON: {_cut(received)}") from error


def _connection(place: SplitResult, seconds: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    made = kind(place.hostname or "", place.port, timeout=seconds)
    made.connect()
    return made


def _hang_up(opened: socket.socket) -> None:
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _of_prompt_logprobs(entries: Sequence[dict[str, Any] | None], sent: Sequence[int] | None) -> _TokenScores:
    """Read vLLM's own form: per token a dict of id to log-probability, which holds the token first; null at place 0."""
    tokens: list[int | None] = [None]
    numbers = [math.nan]
    for place, entry in enumerate(entries[1:], start=1):
        if entry is None:
            raise ValueError(place)
        named = next(iter(entry), "") if sent is None or str(sent[place]) not in entry else str(sent[place])
        tokens.append(int(named))
        numbers.append(_number(entry[named]["logprob"]))
    return _TokenScores(tokens[: len(entries)], np.array(numbers[: len(entries)]))


def _of_echo(logprobs: dict[str, Any], length: int | None) -> _TokenScores:
    """Read the older form: parallel lists, with the token that was made at the end."""
    numbers, named = logprobs["token_logprobs"][:length], logprobs["tokens"][:length]
    tokens = [int(word.removeprefix(_ID)) if word.startswith(_ID) else None for word in named]
    values = [math.nan if place == 0 else _number(value) for place, value in enumerate(numbers)]
    if len(tokens) != len(values):
        raise ValueError(len(tokens))
    return _TokenScores(tokens, np.array(values))


def _number(value: object) -> float:
    """Return a number as it is, and NaN for anything else, which is refused where it is read."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _cut(answer: object) -> str:
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _key(variable: str | None, section: str) -> str | None:
    if variable is None:
        return None
    # The one secret that may not stand in a YAML; everything else about a run does.
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{section}.api_key_variable: the environment variable {variable} is not set. Export {variable}, or remove "
            "api_key_variable."
        )
    return key


def _length(answer: Any) -> int | None:
    """Return a number of tokens; None where a server says none, or something else."""
    return answer if isinstance(answer, int) and not isinstance(answer, bool) else None
