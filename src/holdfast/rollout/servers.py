"""Servers of vLLM, and what is asked of one: token ids in and out, its state, and what it takes in a push.

Nothing here imports vLLM. One request is one completion, with its own seed. What a server answers is checked before it
counts: 200 with fewer tokens than were asked for, tokens of weights that nobody pushed, and tokens without their
log-probabilities are all answers that a server gives.

Of several, requests go to the living one with the fewest; one that died gets none until weights are pushed to it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.http_client import Endpoint, EndpointBusy, EndpointRefuses, EndpointUnwell, api_key, cut
from holdfast.types import Finish

BACKEND = "holdfast"
"""Of the transfer, as `vllm_extension.py` registers it."""
GENERATE = "/inference/v1/generate"
_OF_GENERATE = "generate-tokens-"
"""What that route puts before a request's name."""
_NO_NUMBER = -9999.0
"""What vLLM writes for minus infinity."""
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
_LOOK_SECONDS = 5.0
"""For a server to say that it is well."""
_FACTS = frozenset({
    "identity", "holder", "backend", "dtype", "longest", "vocabulary", "logprobs", "tied", "block", "device", "experts",
})  # fmt: skip
"""What `vllm_extension.py` says of a server, as far as every run asks for it."""
_LEASE_SECONDS = 30.0
"""For a server to say who has it; it may be in the middle of a batch."""
_ABORT_SECONDS = 1.0
"""For a server to hear that requests, or a run, end; one that hangs does not."""


PROBE = "Sort 3 1 2: a's naïve  «x²» → \u65e5\u672c 10,000\n"
"""Servers cut the same text (`vllm_extension.py`)."""


class Reply(NamedTuple):
    """One completion, as a server told it."""

    tokens: NDArray[np.int64]
    """[C]"""
    logprobs: NDArray[np.float32]
    """[C], NaN where the server told none"""
    finish: Finish
    spans: tuple[tuple[int, str], ...]
    """First token and weights of each part."""


class ServerState(NamedTuple):
    """What a server says of itself."""

    model: str
    longest: int
    """Tokens of its context."""
    identity: str
    """Of its process."""
    facts: Mapping[str, Any]


TopRow = Mapping[int, float]
"""Log-probabilities by token, of the most probable ones of a place."""


@dataclass(frozen=True)
class VLLMServer:
    """Asks one server; safe to share between threads."""

    url: str
    endpoint: Endpoint
    """For what may be asked twice; its connections stay open."""
    control: Endpoint
    """For pushes."""
    model: str = ""

    @classmethod
    def of(cls, url: str, section: VLLMEngineConfig, name: str = "rollout.engine") -> VLLMServer:
        """Return the server at an address of a section.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        key = api_key(section.api_key_variable, name)
        endpoint = Endpoint(url, key, section.timeout_seconds, section.attempts, keeps_open=True)
        control = Endpoint(
            url, key, section.timeout_seconds, section.attempts, tried_again=EndpointBusy, may_be_empty=True
        )
        return cls(url, endpoint, control, section.model or "")

    def is_well(self) -> bool:
        """Return whether the server and the engine behind it live."""
        return replace(self.control, timeout_seconds=_LOOK_SECONDS).is_well("/health")

    def state(self) -> ServerState:
        """Return what the server says of itself.

        Raises:
            EndpointRefuses, EndpointUnwell: It does not, or it is no vLLM that was started for us.
        """
        looks = replace(self.control, tried_again=EndpointUnwell)
        listed = looks.ask("GET", "/v1/models")
        told = looks.ask("POST", "/collective_rpc", {"method": "holdfast_identity"})
        try:
            models = {str(item["id"]): item for item in listed["data"] if item.get("parent") is None}
            facts = told["results"][0]
            missing = sorted(_FACTS - set(facts))
            if missing:
                raise EndpointRefuses(f"does not say its {missing[0]}: it was started by another version of Holdfast")
            name = self.model or next(iter(models))
            if name not in models:
                raise EndpointRefuses(f"serves {', '.join(models)}, and no {name}")
            return ServerState(name, int(facts["longest"]), str(facts["identity"]), facts)
        except (LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EndpointRefuses(f"is no vLLM that takes our weights: it answers {cut(told)}") from error

    def lease(self, holder: Mapping[str, Any], seconds: float, replaces: str | None = None) -> tuple[Any, float]:
        """Ask that one run alone pushes to the server for some seconds; return who has it, and how long.

        Raises:
            EndpointRefuses, EndpointUnwell: It does not say.
        """
        content = {"holder": dict(holder), "seconds": seconds, "replaces": replaces}
        # Who gives it back ends, and does not wait for a server that hangs.
        longest = _LEASE_SECONDS if seconds else _ABORT_SECONDS
        looks = replace(self.control, timeout_seconds=min(self.control.timeout_seconds, longest))
        told = looks.ask("POST", "/collective_rpc", {"method": "holdfast_lease", "kwargs": content})
        try:
            return told["results"][0]["holder"], float(told["results"][0]["seconds"])
        except (LookupError, TypeError, ValueError) as error:
            raise EndpointRefuses(f"does not say who pushes to it: {cut(told)}") from error

    def post(self, path: str, content: Any = None, **query: str) -> Any:
        """Ask what changes the server.

        Raises:
            EndpointRefuses, EndpointUnwell: It did not do it.
        """
        return self.control.ask("POST", f"{path}?{urlencode(query)}" if query else path, content)

    def complete(self, name: str, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Reply:
        """Return one completion.

        Args:
            name: Of the request, for `abort`.
            prompt: Token ids.
            sampling: In vLLM's words, from `sampling_words`.

        Raises:
            EndpointRefuses: There is none, or what came cannot be trained on.
            EndpointUnwell: The server is not well.
        """
        asked = {
            "model": self.model or None,
            "request_id": name,
            "token_ids": list(prompt),
            "sampling_params": sampling,
        }
        # Who asks decides where a request goes next, so the endpoint itself tries once.
        return reply_of(replace(self.endpoint, attempts=1).ask("POST", GENERATE, asked), int(sampling["max_tokens"]))

    def tops(self, prompt: Sequence[int], count: int) -> list[TopRow]:
        """Return the most probable next tokens behind each token of a prompt, at temperature 1.

        All but the last row are told of the prompt, which never reads cached blocks; the last is of a generated token,
        which does.

        Raises:
            EndpointRefuses, EndpointUnwell: There is no such answer.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": count, "detokenize": False, "ignore_eos": True}
        asked = {"model": self.model or None, "token_ids": list(prompt)}
        try:
            generated = self.endpoint.ask("POST", GENERATE, asked | {"sampling_params": sampling})
            told = self.endpoint.ask(
                "POST", GENERATE, asked | {"sampling_params": {**sampling, "prompt_logprobs": count}}
            )
            rows: list[TopRow] = [
                {int(token): float(entry["logprob"]) for token, entry in row.items()}
                for row in told["prompt_logprobs"][1:]
            ]
            last = generated["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            rows.append({int(entry["token_id"]): float(entry["logprob"]) for entry in last})
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise EndpointRefuses("tells no log-probabilities of a prompt") from error
        if len(rows) != len(prompt):
            raise EndpointRefuses(f"tells log-probabilities of {len(rows)} places where {len(prompt)} were asked for")
        return rows

    def abort(self, names: Sequence[str]) -> None:
        """End requests; what they have so far is their answer."""
        content = {"request_ids": [f"{_OF_GENERATE}{name}" for name in names]}
        try:
            replace(self.control, timeout_seconds=_ABORT_SECONDS, attempts=1).ask("POST", "/abort_requests", content)
        except (EndpointRefuses, EndpointUnwell):
            return  # a server that does not hear us answers nobody either

    def hang_up(self) -> None:
        """Wait for none of the answers that are on their way."""
        self.endpoint.hang_up()
        self.control.hang_up()

    def close(self) -> None:
        """Close connections."""
        self.endpoint.close()


@lru_cache(maxsize=1)  # a large vocabulary takes a tenth of a second, and every push asks
def tokenizer_digest(tokenizer: Any) -> str | None:
    """Return what a server says of the same tokenizer; None of one that no server can tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    vocabulary, probe = backend.get_vocab(), backend.encode(PROBE, add_special_tokens=False).ids
    return str(xxhash.xxh3_128_hexdigest(json.dumps([sorted(vocabulary.items()), probe]).encode()))


def template_digest(tokenizer: Any) -> str | None:
    """Return what a server says of the same chat template; None where there is none, or several."""
    template = tokenizer.chat_template
    return str(xxhash.xxh3_128_hexdigest(template.encode())) if isinstance(template, str) else None


def sampling_words(sampling: SamplingConfig, stops: Sequence[int]) -> dict[str, Any]:
    """Return how completions are sampled in vLLM's words; the seed is each request's own.

    Texts that end a completion are looked for where tokens arrive: vLLM needs its own tokenizer for them.
    """
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(stops),
        "ignore_eos": True,  # what ends a completion is decided here, for every engine alike
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def reply_of(answer: Any, limit: int) -> Reply:
    """Read a server's answer.

    Args:
        answer: As JSON.
        limit: Most tokens that were asked for.

    Raises:
        EndpointRefuses: It lacks tokens, log-probabilities or weights, or was cut below the limit.
    """
    try:
        choice = answer["choices"][0]
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        finish = _FINISHES.get(choice["finish_reason"], Finish.ERROR)
        spans = tuple((int(span["start"]), str(span["version"])) for span in choice["weight_versions"])
        scored = [entry["token_id"] for entry in content]
        logprobs = [_number(entry["logprob"]) for entry in content]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise EndpointRefuses(
            "answers without token ids, log-probabilities or the version of its weights; start it by `holdfast serve`, "
            f"or with --enable-scale-out --logprobs-mode processed_logprobs: {cut(answer)}"
        ) from error
    _check_reply(finish, tokens, scored, limit)
    if finish is Finish.ERROR:
        raise EndpointRefuses(f"ended a completion by {choice['finish_reason']!r}")
    if tokens and (not spans or spans[0][0] != 0):
        raise EndpointRefuses("does not say of which weights its first token is")
    return Reply(np.array(tokens, np.int64), np.array(logprobs, np.float32), finish, spans)


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


def _number(value: object) -> float:
    """Return a log-probability, NaN where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= _NO_NUMBER:
        return math.nan
    return float(value)


class OtherWeights(Exception):  # noqa: N818 - the name says what happened
    """A completion of weights that were not pushed."""


class _PushedWeights(NamedTuple):
    """Weights that servers have, or had."""

    order: int
    """Of pushes; averages and weights of one version are two."""
    version: int


@dataclass
class Fleet:
    """The servers that have the present weights; safe to share between threads."""

    servers: list[VLLMServer] = field(default_factory=list)
    dead: dict[str, str] = field(default_factory=dict)
    """Address -> what was seen."""
    pushes: dict[str, _PushedWeights] = field(default_factory=dict)
    """By the name of the weights; those that nothing on its way may be of are dropped."""
    newest: int = 0
    """Order of the last push."""
    busy: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, servers: Sequence[VLLMServer]) -> None:
        """Ask these servers from now on: they took the last push."""
        with self.lock:
            self.servers, self.dead = list(servers), {}

    def expect(self, label: str, version: int, oldest: int) -> None:
        """Take samples from weights called `label`, and no more from those pushed before the one of order `oldest`."""
        self.newest += 1
        living = {name: push for name, push in self.pushes.items() if push.order >= oldest}
        self.pushes = living | {label: _PushedWeights(self.newest, version)}

    def version(self, label: str, oldest: int) -> int:
        """Return the version of weights that were pushed under a name.

        Raises:
            OtherWeights: None were, or they are older than the push of order `oldest`.
        """
        push = self.pushes.get(label)
        if push is None or push.order < oldest:
            raise OtherWeights(
                f"samples from weights called {label!r}, which this run did not push to it, or replaced since"
            )
        return push.version

    def take(self) -> VLLMServer:
        """Return the living server with the fewest requests.

        Raises:
            RunStopped: None lives.
        """
        with self.lock:
            living = [server for server in self.servers if server.url not in self.dead]
            if not living:
                raise RunStopped(
                    f"No server is left to sample from: {'; '.join(f'{url} {why}' for url, why in self.dead.items())}. "
                    "Start them again; the same command then goes on from the last checkpoint."
                )
            server = min(living, key=lambda one: self.busy.get(one.url, 0))
            self.busy[server.url] = self.busy.get(server.url, 0) + 1
            return server

    def release(self, server: VLLMServer) -> None:
        """Count a request of a server as done."""
        with self.lock:
            self.busy[server.url] -= 1

    def is_last(self, server: VLLMServer) -> bool:
        """Say whether no other server lives."""
        with self.lock:
            return [one.url for one in self.servers if one.url not in self.dead] == [server.url]

    def bury(self, server: VLLMServer, why: str) -> None:
        """Ask a server no more until weights are pushed to it."""
        with self.lock:
            if server.url not in self.dead:
                self.dead[server.url] = why
                print(f"warning: the server at {server.url} {why}; its requests go to the others", flush=True)
