"""The `reference` section where the reference policy is not in this run's memory, and where it is asked only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from holdfast.config.base import ByKind, Mistake, Positive, PositiveInt, Section
from holdfast.config.rollout import ReferenceConfig, ReferenceSyncConfig


class ServerReferenceConfig(Section):
    """A model behind an OpenAI-compatible endpoint, such as vLLM's, that tells the log-probabilities of given tokens.

    Before step 1 its tokenizer is compared with the policy's, and what it says of a text with what the policy says.
    """

    kind: Literal["server"] = "server"
    url: str
    """Up to and including the version, as in http://localhost:8000/v1."""
    model: str | None = None
    """Name it is served under; default: the only one there."""
    answers: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """How it is asked: `prompt_logprobs` is vLLM's own form, which names every token by its id; `echo` is the older one
    of /completions (`echo: true, logprobs: 0`), for servers without the first."""
    bound: Positive | None = 0.1
    """Largest difference in nats, over the tokens of a text, from what the policy says before step 1; null: the server
    has another model by intent, and the difference is only printed."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the key; a key itself never stands in a file."""
    timeout_seconds: Positive = 60.0
    """Longest wait for one whole answer."""
    attempts: PositiveInt = 4
    """Requests before the run stops; the connection, 408, 409, 429 and 5xx are tried again."""
    requests: PositiveInt = 16
    """Most requests of one rank at a time."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an address that is none, and a key in the place of its variable."""
        if not _is_address(self.url):
            yield "url", f"{self.url!r} is no address; write it as in http://localhost:8000/v1"
        if self.api_key_variable is not None and not self.api_key_variable.isidentifier():
            yield "api_key_variable", "this is no name of a variable; write a name such as OPENAI_API_KEY, never a key"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


class _Kept(Section):
    precompute: bool = False
    """Score all rows once before the first step, keep the numbers in a file, and train without the reference in
    memory. A later start finds the file."""
    cache: str | None = None
    """That file; default: `.NAME.reference` beside the run's directory. One that was made of other rows, or by another
    model or tokenizer, is refused."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a file that nothing is kept in."""
        yield from super().mistakes()
        if self.cache is not None and not self.precompute:
            yield "cache", "nothing is kept there unless reference.precompute is true; set it, or leave cache out"


class PairReferenceConfig(_Kept, ReferenceConfig):
    """Where the reference policy lives, and whether it is asked once for all."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a reference that follows the policy, and was asked before the policy moved."""
        yield from super().mistakes()
        if self.sync is not None and self.precompute:
            yield "sync", "reference.precompute asks the reference once, before it follows; leave one of them out"


def sync_of(section: ReferenceConfig | ServerReferenceConfig) -> ReferenceSyncConfig | None:
    """Return how a reference follows the policy; None where it stays."""
    return section.sync if isinstance(section, ReferenceConfig) else None


class PairServerReferenceConfig(_Kept, ServerReferenceConfig):
    """A model behind an OpenAI-compatible endpoint, such as vLLM's, that tells the log-probabilities of given tokens.

    Before step 1 its tokenizer is compared with the policy's, and what it says of a text with what the policy says.
    """


Reference = Annotated[ReferenceConfig | ServerReferenceConfig, ByKind("auto")]
PairReference = Annotated[PairReferenceConfig | PairServerReferenceConfig, ByKind("auto")]
