"""Read the responses of vLLM servers to an engine: completions, proofs, and what a server says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.http import EndpointRefuses
from holdfast.responses import LARGEST_VOCABULARY, Field, first_choice
from holdfast.text.escaping import escaped
from holdfast.types import Finish

MODELS, RPC, GENERATE = "/v1/models", "/collective_rpc", "/inference/v1/generate"
"""Routes whose responses are read."""
_LARGEST_BLOCK = 65536
"""Of a cache of keys and values, in tokens: the proof of a push has a sequence that is longer than a block."""
_LONGEST_LEASE_SECONDS = 86400
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class Reply(NamedTuple):
    """One completion that a server returned."""

    tokens: NDArray[np.int64]
    """[C]"""
    logprobs: NDArray[np.float32]
    """[C], NaN where the server told none"""
    finish: Finish
    spans: tuple[tuple[int, str], ...]
    """(index of the first token, name of the weights) of each part of the completion."""


class ServerState(NamedTuple):
    """The state that a server reports of itself."""

    model: str
    longest: int
    """Length of its context, in tokens."""
    identity: str
    """An identifier of its process, which a restart changes."""
    facts: Mapping[str, Any]
    """As `extension.py: Extension.holdfast_identity` returns them."""


TopRow = Mapping[int, float]
"""Log-probabilities by token, of the most probable ones of a place."""

_FACTS: Mapping[str, Callable[[Field], Any]] = {
    "identity": Field.file_name,
    "holder": lambda fact: None if fact.value is None else _holder(fact),
    "backend": Field.text_or_none,
    "dtype": Field.text,
    "longest": Field.positive,
    "vocabulary": Field.positive,
    "logprobs": Field.text,
    "tied": Field.flag,
    "block": lambda fact: fact.whole(1, _LARGEST_BLOCK),
    "device": Field.text,
    "experts": Field.flag,
    "workers": Field.positive,
    "adapter_rank": lambda fact: None if fact.is_absent else fact.positive(),
    "version": Field.text,
    "tokenizer": Field.text_or_none,
    "template": Field.text_or_none,
}
"""How each thing is read that a server says of itself."""


def server_state_of(listed: Any, described: Any, model: str = "") -> ServerState:
    """Read what a server says of its models and of itself.

    Args:
        listed: Its models.
        described: Answer of our extension of its workers.
        model: That is asked for; "" for the first.

    Raises:
        EndpointRefuses: It has no such model, or answers something else.
    """
    models = [entry.key("id").text() for entry in Field(MODELS, listed).key("data").items(1) if _is_whole_model(entry)]
    name = model or next(iter(models), "")
    if not name or name not in models:
        raise EndpointRefuses(f"serves {escaped(', '.join(models)) or 'adapters alone'}, and no {name or 'model'}")
    described_facts = Field(RPC, described).key("results").items(1)[0]
    facts = {fact: read(described_facts.key(fact)) for fact, read in _FACTS.items()}
    return ServerState(name, facts["longest"], facts["identity"], facts)


def model_names_of(listed: Any) -> list[str]:
    """Read the names of a server's models and adapters.

    Raises:
        EndpointMistaken: It answers something else.
    """
    return [entry.key("id").text() for entry in Field(MODELS, listed).key("data").items(1)]


def route_names_of(listed: Any) -> frozenset[str]:
    """Read the routes in a server's description of itself.

    Raises:
        EndpointMistaken: It answers something else.
    """
    return frozenset(Field("/openapi.json", listed).key("paths").names())


def digests_of(answer: Any, workers: int) -> list[dict[str, str]]:
    """Read the hashes of files by name, for each of a server's workers, of which there are so many.

    Raises:
        EndpointMistaken: It answers something else.
    """
    results = Field(RPC, answer).key("results").items(workers)
    return [{name: worker.key(name).file_name() for name in worker.names()} for worker in results]


def server_lease_of(answer: Any) -> tuple[dict[str, Any], float]:
    """Read who pushes to a server, and for how many seconds no other may.

    Raises:
        EndpointMistaken: It answers something else.
    """
    lease = Field(RPC, answer).key("results").items(1)[0]
    seconds = lease.key("seconds")
    if not seconds.size() <= _LONGEST_LEASE_SECONDS:  # NaN is in no range
        seconds.refuse(f"a number up to {_LONGEST_LEASE_SECONDS}")
    return _holder(lease.key("holder")), seconds.size()


def _holder(holder: Field) -> dict[str, Any]:
    texts = {name: holder.key(name).text() for name in ("token", "host")}
    machine = [field.text() for field in holder.key("machine").items()]
    return texts | {"pid": holder.key("pid").positive(), "machine": machine}


def _is_whole_model(listed: Field) -> bool:
    return listed.key("parent").is_absent  # an adapter has one


def reply_of(answer: Any, limit: int, vocabulary: int = LARGEST_VOCABULARY, adapter: str = "") -> Reply:
    """Read a completion.

    Args:
        answer: As JSON.
        limit: Most tokens that were asked for.
        vocabulary: Tokens that there are.
        adapter: Name of the adapter that was asked for; "" for none.

    Raises:
        EndpointMistaken: It lacks tokens, log-probabilities or weights, or has something else in their place.
        EndpointRefuses: It is of other tokens than it has, or was cut below the limit.
    """
    choice = first_choice(GENERATE, answer)
    if adapter and (model := Field(GENERATE, answer).key("model").text()) != adapter:
        raise EndpointRefuses(f"answers of the model {escaped(model)} where {adapter} was asked for")
    tokens = [field.token(vocabulary) for field in choice.key("token_ids").items()]
    content = choice.key("logprobs").key("content").items()
    finish = _FINISHES.get(choice.key("finish_reason").text(), Finish.ERROR)
    spans = _spans_of(choice.key("weight_versions"))
    scored = [field.key("token_id").token(vocabulary) for field in content]
    logprobs = [field.key("logprob").logprob_or_nan() for field in content]
    _check_reply(finish, tokens, scored, limit)
    if finish is Finish.ERROR:
        raise EndpointRefuses(f"ended a completion by {choice.key('finish_reason').value!r}")
    if tokens and (not spans or spans[0][0] != 0):
        raise EndpointRefuses("does not say of which weights its first token is")
    return Reply(np.array(tokens, np.int64), np.array(logprobs, np.float32), finish, spans)


def _spans_of(listed: Field) -> tuple[tuple[int, str], ...]:
    spans: list[tuple[int, str]] = []
    for span in listed.items():
        start = span.key("start").whole(spans[-1][0] + 1 if spans else 0, LARGEST_VOCABULARY)
        spans.append((start, span.key("version").text()))
    return tuple(spans)


def _check_reply(finish: Finish, tokens: Sequence[int], scored: Sequence[int], limit: int) -> None:
    if scored != tokens:
        raise EndpointRefuses(
            f"tells log-probabilities of {len(scored)} tokens, which are not the {len(tokens)} it chose"
        )
    if finish is Finish.LENGTH and len(tokens) != limit:
        raise EndpointRefuses(
            f"cut a completion at {len(tokens)} tokens where {limit} were asked for: its context is too short "
            "(--max-model-len)"
        )
    if len(tokens) > limit or (not tokens and finish is not Finish.ABORT):
        raise EndpointRefuses(f"answers {len(tokens)} tokens where 1 to {limit} were asked for")


def prompt_tokens_of(answer: Any) -> list[int]:
    """Read the tokens of a prompt after the server has put those of its images into it.

    Raises:
        EndpointMistaken: It does not say.
    """
    return [field.token() for field in Field(GENERATE, answer).key("prompt_token_ids").items()]


def tops_of(answer: Any, length: int, count: int, vocabulary: int = LARGEST_VOCABULARY) -> Sequence[TopRow]:
    """Read the most probable tokens behind each token of a prompt but its last.

    Args:
        answer: As JSON.
        length: Tokens of the prompt.
        count: Tokens that were asked for at each place; a server may tell the prompt's own besides.
        vocabulary: Tokens that there are.

    Raises:
        EndpointMistaken: It lacks some, or has something else in their place.
    """
    return Field(GENERATE, answer).key("prompt_logprobs").prompt_rows(length, min(count, vocabulary), vocabulary)


def next_tops_of(answer: Any, count: int, vocabulary: int = LARGEST_VOCABULARY) -> TopRow:
    """Read the most probable tokens of the first place of a completion.

    Raises:
        EndpointMistaken: As `tops_of`.
    """
    choice = first_choice(GENERATE, answer)
    listed = choice.key("logprobs").key("content").items(1)[0].key("top_logprobs")
    row = {top.key("token_id").token(vocabulary): top.key("logprob").logprob() for top in listed.items()}
    if len(row) < min(count, vocabulary):
        listed.refuse(f"a list of {min(count, vocabulary)} tokens")
    return row


def inspection_of(answer: Any) -> dict[str, float | None]:
    """Read how far tensors of a server are from those of a bucket, on the worker that is furthest; None: none can say.

    Raises:
        EndpointMistaken: It answers something else.
    """
    sizes: dict[str, list[float]] = {}
    for tensors in Field(RPC, answer).key("results").items(1):
        for name in tensors.names():
            field, told = tensors.key(name), sizes.setdefault(name, [])
            told += [] if field.value is None else [field.size()]
    return {name: max(told, key=lambda size: (isnan(size), size), default=None) for name, told in sizes.items()}
