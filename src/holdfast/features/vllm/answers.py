"""Reads the answers of vLLM servers field by field. An answer is refused if a field has a wrong type or range.

A server that another version, a proxy or a mistake stands behind answers 200 with whatever it has. Nothing is converted
on the way: `"3"` is no token, `true` is no number, and what is refused is named by its route and its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.http import EndpointMistaken, EndpointRefuses
from holdfast.text.escaping import escaped
from holdfast.types import Finish

MODELS, RPC, GENERATE = "/v1/models", "/collective_rpc", "/inference/v1/generate"
"""Routes whose answers are read."""
LARGEST_VOCABULARY = 2**31
_NO_NUMBER = -9999.0
"""What vLLM writes for minus infinity."""
_ROUNDING = 1e-4
"""By which a logarithm of a probability may be above 0."""
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
_SHOWN = 60
_ABSENT = object()
"""Stands for what an object lacks."""


class Field(NamedTuple):
    """A value in an answer, with its path. Its methods raise EndpointMistaken for a value of another type."""

    route: str
    value: Any
    path: tuple[str | int, ...] = ()

    def refuse(self, needed: str) -> NoReturn:
        """Refuse the answer for this value.

        Raises:
            EndpointMistaken: Always.
        """
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).lstrip(".")
        subject = f"{escaped(steps)} {_shown(self.value)}".lstrip()
        raise EndpointMistaken(f"answers {self.route} with {subject}, where {needed} is needed")

    def key(self, name: str) -> Field:
        """Return a value of an object; a missing value is refused by the method that reads it."""
        if not isinstance(self.value, dict):
            self.refuse(f"an object with {name}")
        return Field(self.route, self.value.get(name, _ABSENT), (*self.path, name))

    def names(self) -> list[str]:
        """Return the names of an object's values."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return list(self.value)

    def items(self, least: int = 0) -> list[Field]:
        """Return the values of a list."""
        if not isinstance(self.value, list) or len(self.value) < least:
            self.refuse(f"a list of at least {least}" if least else "a list")
        return [Field(self.route, member, (*self.path, number)) for number, member in enumerate(self.value)]

    def whole(self, least: int, most: int) -> int:
        """Return a whole number."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.refuse(f"a whole number from {least} to {most}")
        return self.value

    def positive(self) -> int:
        """Return a whole number from 1."""
        return self.whole(1, LARGEST_VOCABULARY)

    def token(self, vocabulary: int) -> int:
        """Return the id of a token that is the name of a value."""
        text = self.value
        if not text.isascii() or not text.isdecimal() or len(text) > len(str(vocabulary)) or int(text) >= vocabulary:
            self.refuse(f"the id of a token below {vocabulary}")
        return int(text)

    def size(self) -> float:
        """Return a number that is not negative; infinity and NaN are what sizes of spoilt tensors are."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or self.value < 0:
            self.refuse("a number from 0")
        return float(self.value)

    def text(self) -> str:
        """Return a text that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            self.refuse("a text")
        return self.value

    def text_or_none(self) -> str | None:
        """Return a text, or None for null."""
        return None if self.value is None else self.text()

    def file_name(self) -> str:
        """Return a text that may be a part of a file's name."""
        text = self.text()
        if not text.isascii() or not text.replace("-", "").isalnum():
            self.refuse("letters, digits and dashes")
        return text

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def logprob(self) -> float:
        """Return the logarithm of a probability."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _NO_NUMBER <= value <= _ROUNDING:  # NaN is in no range
            self.refuse("the logarithm of a probability, a number up to 0")
        return float(value)

    def logprob_or_nan(self) -> float:
        """Return the logarithm of a probability, NaN where there is none: of near certain tokens vLLM may tell none."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return math.nan if value is None or (is_number and not value > _NO_NUMBER) else self.logprob()


def _shown(value: Any) -> str:
    """Return a value in few words, whatever is in it."""
    if value is _ABSENT:
        return "missing"
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
    "block": Field.positive,
    "device": Field.text,
    "experts": Field.flag,
    "workers": Field.positive,
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


def server_lease_of(answer: Any) -> tuple[dict[str, Any], float]:
    """Read who pushes to a server, and for how many seconds no other may.

    Raises:
        EndpointMistaken: It answers something else.
    """
    lease = Field(RPC, answer).key("results").items(1)[0]
    seconds = lease.key("seconds")
    if not math.isfinite(seconds.size()):
        seconds.refuse("a finite number")
    return _holder(lease.key("holder")), seconds.size()


def _holder(holder: Field) -> dict[str, Any]:
    texts = {name: holder.key(name).text() for name in ("token", "host")}
    machine = [field.text() for field in holder.key("machine").items()]
    return texts | {"pid": holder.key("pid").positive(), "machine": machine}


def _is_whole_model(listed: Field) -> bool:
    return any(listed.key("parent").value is no_parent for no_parent in (None, _ABSENT))  # an adapter has one


def reply_of(answer: Any, limit: int, vocabulary: int = LARGEST_VOCABULARY) -> Reply:
    """Read a completion.

    Args:
        answer: As JSON.
        limit: Most tokens that were asked for.
        vocabulary: Tokens that there are.

    Raises:
        EndpointMistaken: It lacks tokens, log-probabilities or weights, or has something else in their place.
        EndpointRefuses: It is of other tokens than it has, or was cut below the limit.
    """
    choice = Field(GENERATE, answer).key("choices").items(1)[0]
    tokens = [field.whole(0, vocabulary - 1) for field in choice.key("token_ids").items()]
    content = choice.key("logprobs").key("content").items()
    finish = _FINISHES.get(choice.key("finish_reason").text(), Finish.ERROR)
    spans = _spans_of(choice.key("weight_versions"))
    scored = [field.key("token_id").whole(0, vocabulary - 1) for field in content]
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


def tops_of(answer: Any, length: int, count: int, vocabulary: int = LARGEST_VOCABULARY) -> list[TopRow]:
    """Read the most probable tokens behind each token of a prompt but its last.

    Args:
        answer: As JSON.
        length: Tokens of the prompt.
        count: Tokens that were asked for at each place; a server may tell the prompt's own besides.
        vocabulary: Tokens that there are.

    Raises:
        EndpointMistaken: It lacks some, or has something else in their place.
    """
    positions = Field(GENERATE, answer).key("prompt_logprobs")
    if len(positions.items()) != length:
        positions.refuse(f"a list of {length}")
    return [_row(position, min(count, vocabulary), vocabulary) for position in positions.items()[1:]]


def _row(position: Field, least: int, vocabulary: int) -> TopRow:
    names = [Field(position.route, name, (*position.path, "key")) for name in position.names()]
    row = {token.token(vocabulary): position.key(token.value).key("logprob").logprob() for token in names}
    if len(row) < least:
        position.refuse(f"an object of at least {least} tokens")
    return row


def next_tops_of(answer: Any, count: int, vocabulary: int = LARGEST_VOCABULARY) -> TopRow:
    """Read the most probable tokens of the first place of a completion.

    Raises:
        EndpointMistaken: As `tops_of`.
    """
    choice = Field(GENERATE, answer).key("choices").items(1)[0]
    listed = choice.key("logprobs").key("content").items(1)[0].key("top_logprobs")
    row = {top.key("token_id").whole(0, vocabulary - 1): top.key("logprob").logprob() for top in listed.items()}
    if len(row) < min(count, vocabulary):
        listed.refuse(f"a list of {min(count, vocabulary)} tokens")
    return row


def inspection_of(answer: Any) -> dict[str, float | None]:
    """Read how far tensors of a server are from those of a bucket; None where it cannot say.

    Raises:
        EndpointMistaken: It answers something else.
    """
    tensors = Field(RPC, answer).key("results").items(1)[0]
    sizes = {name: tensors.key(name) for name in tensors.names()}
    return {name: None if field.value is None else field.size() for name, field in sizes.items()}
