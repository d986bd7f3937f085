"""A model behind an OpenAI-compatible endpoint, as a section of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from holdfast.config.base import Mistake, Positive, PositiveInt, Section


class EndpointConfig(Section):
    """How a server is asked, whatever for."""

    model: str | None = None
    """Name that the server gives the model; default: the only model that it serves."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the key; a key itself never stands in a file."""
    timeout_seconds: Positive = 60.0
    """Longest wait for one whole answer."""
    attempts: PositiveInt = 4
    """Requests before the run stops; the connection, 408, 409, 429 and 5xx are tried again."""
    requests: PositiveInt = 16
    """Most requests of one rank at a time."""


class ServerConfig(EndpointConfig):
    """Where an endpoint is that tells the log-probabilities of given tokens, and how it is asked."""

    kind: Literal["server"] = "server"
    url: str
    """Address of the endpoint up to and including the version, as in http://localhost:8000/v1."""
    answers: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """How the server is asked for log-probabilities: `prompt_logprobs` is vLLM's own form, which names every token by
    its id; `echo` is the older form of /completions (`echo: true, logprobs: 0`), for servers without the first.
    """

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what is wrong with the address or the key."""
        yield from super().mistakes()
        yield from endpoint_mistakes(self.url, self.api_key_variable)


def endpoint_mistakes(url: str, key_variable: str | None) -> Iterator[Mistake]:
    """Yield an address that is none, and a key in the place of its variable."""
    if not _is_address(url):
        yield "url", f"{url!r} is no address; write it as in http://localhost:8000/v1"
    if key_variable is not None and not key_variable.isidentifier():
        yield "api_key_variable", "this is no name of a variable; write a name such as OPENAI_API_KEY, never a key"


def _is_address(url: str) -> bool:
    try:
        split = urlsplit(url)
        return split.scheme in {"http", "https"} and bool(split.hostname) and split.port != 0
    except ValueError:  # a port that is not a number
        return False
