"""A model behind an OpenAI-compatible endpoint, as a section of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from holdfast.config.base import Mistake, Positive, PositiveInt, PublicStr, Section, VariableName


class EndpointConfig(Section):
    """How a server is asked, whatever for."""

    model: PublicStr | None = None
    """Name that the server gives the model; default: the only model that it serves."""
    api_key_variable: VariableName | None = None
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
    url: PublicStr
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
    """Yield an address that is none or has a password, which is not shown, and a key in the place of its variable."""
    why_not = _why_no_address(url)
    if "@" in url and (why_not is not None or "@" in urlsplit(url).netloc):
        yield "url", "an address has no user and no password; name the variable of a key in api_key_variable"
    elif why_not is not None:
        yield "url", f"{url!r} is no address{why_not}; write it as in http://localhost:8000/v1"
    if key_variable is not None and not key_variable.isidentifier():
        yield "api_key_variable", "this is no name of a variable; write a name such as OPENAI_API_KEY, never a key"


def _why_no_address(url: str) -> str | None:
    """Return what follows "is no address" in a message; None for an address."""
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:  # brackets that do not close
        return ""
    if split.scheme not in {"http", "https"} or not host:
        return ""
    try:
        host.encode("idna")  # as a connection does
    except UnicodeError:
        return f": {host!r} is no name of a host"
    try:
        return None if split.port != 0 else ": ports begin with 1"
    except ValueError:
        return ": its port is no whole number from 1 to 65535"
