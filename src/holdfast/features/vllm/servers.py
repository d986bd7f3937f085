"""Clients of vLLM servers. They request completions as token ids, read a server's state, and send pushes.

Nothing here imports vLLM. One request is one completion, with its own seed. What a server answers is checked before it
counts (`responses.py`): 200 with fewer tokens than were asked for, tokens of weights that nobody pushed, and tokens
without their log-probabilities are all answers that a server gives.

Of several, requests go to the living one with the fewest; one that died gets none until weights are pushed to it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import xxhash

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.responses import (
    GENERATE,
    MODELS,
    RPC,
    Reply,
    ServerState,
    TopRow,
    digests_of,
    model_names_of,
    next_tops_of,
    reply_of,
    route_names_of,
    server_lease_of,
    server_state_of,
    tops_of,
)
from holdfast.http import Endpoint, EndpointBusy, EndpointRefuses, EndpointUnwell, api_key
from holdfast.responses import LARGEST_VOCABULARY
from holdfast.types import Finish

BACKEND = "holdfast"
"""Of the transfer, as `extension.py` registers it."""
_OF_GENERATE = "generate-tokens-"
"""What that route puts before a request's name."""
_OPENAPI = "/openapi.json"
ROUTES = (
    GENERATE, MODELS, RPC, "/health", "/abort_requests", "/pause", "/resume", "/reset_prefix_cache",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip
"""Routes that every run uses."""
_LOOK_SECONDS = 5.0
"""For a server to say that it is well."""
_LEASE_SECONDS = 30.0
"""For a server to say who has it; it may be in the middle of a batch."""
_ABORT_SECONDS = 1.0
"""For a server to hear that requests, or a run, end; one that hangs does not."""


PROBE = "Sort 3 1 2: a's naïve  «x²» → \u65e5\u672c 10,000\n"
"""Servers cut the same text (`extension.py`)."""


@dataclass(frozen=True)
class VLLMServer:
    """The client of one server; threads may share it."""

    url: str
    endpoint: Endpoint
    """The endpoint for requests that may be repeated; its connections stay open."""
    control: Endpoint
    """The endpoint for pushes and probes; a request is repeated only while the server is busy."""
    model: str = ""
    vocabulary: int = LARGEST_VOCABULARY
    """Size of the vocabulary; a completion with a token beyond it is refused."""
    workers: int = 1
    """Number of the workers, each of which answers what is asked of all."""

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
        listed = looks.ask("GET", MODELS)
        described = looks.ask("POST", RPC, {"method": "holdfast_identity"})
        return server_state_of(listed, described, self.model)

    def lease(self, holder: Mapping[str, Any], seconds: float, replaces: str | None = None) -> tuple[Any, float]:
        """Ask that one run alone pushes to the server for some seconds; return who has it, and how long.

        Raises:
            EndpointRefuses, EndpointUnwell: It does not say.
        """
        content = {"holder": dict(holder), "seconds": seconds, "replaces": replaces}
        # Who gives it back ends, and does not wait for a server that hangs.
        longest = _LEASE_SECONDS if seconds else _ABORT_SECONDS
        looks = replace(self.control, timeout_seconds=min(self.control.timeout_seconds, longest))
        return server_lease_of(looks.ask("POST", RPC, {"method": "holdfast_lease", "kwargs": content}))

    def post(self, path: str, content: Any = None, **query: str) -> Any:
        """Ask what changes the server.

        Raises:
            EndpointRefuses, EndpointUnwell: It did not do it.
        """
        return self.control.ask("POST", f"{path}?{urlencode(query)}" if query else path, content)

    def paths(self) -> frozenset[str] | None:
        """Return the routes that the server lists; None if it lists none."""
        try:
            return route_names_of(self.control.ask("GET", _OPENAPI))
        except (EndpointRefuses, EndpointUnwell):
            return None

    def load_adapter(self, label: str, directory: Path) -> None:
        """Load an adapter from peft's two files under a name.

        Raises:
            EndpointRefuses, EndpointUnwell: It was not loaded.
        """
        self._of_adapters("load", {"lora_name": label, "lora_path": str(directory)})

    def unload_adapter(self, label: str) -> None:
        """Forget an adapter; a worker keeps its memory until another adapter takes it.

        Raises:
            EndpointRefuses, EndpointUnwell: It was not forgotten.
        """
        self._of_adapters("unload", {"lora_name": label})

    def _of_adapters(self, verb: str, content: Mapping[str, str]) -> None:
        replace(self.control, is_text=True).ask("POST", f"/v1/{verb}_lora_adapter", dict(content))

    def has_adapter(self, label: str) -> bool:
        """Return whether an adapter is loaded; True of a server that does not say."""
        try:
            return label in model_names_of(self.control.ask("GET", MODELS))
        except (EndpointRefuses, EndpointUnwell):
            return True

    def file_digests(self, directory: Path, names: Sequence[str]) -> list[dict[str, str]]:
        """Return the hashes of files as each worker of the server sees them; without files that it does not see.

        Raises:
            EndpointRefuses, EndpointUnwell: It does not say.
        """
        content = {"method": "holdfast_digests", "kwargs": {"directory": str(directory), "names": list(names)}}
        return digests_of(self.post(RPC, content), self.workers)

    def complete(self, name: str, prompt: ServedPrompt, sampling: Mapping[str, Any], adapter: str = "") -> Reply:
        """Return one completion.

        Args:
            name: Of the request, for `abort`.
            prompt: That is continued.
            sampling: In vLLM's words, from `sampling_words`.
            adapter: Name of the adapter that samples; "" for the model without one.

        Raises:
            EndpointRefuses: There is none, or what came cannot be trained on.
            EndpointUnwell: The server is not well.
        """
        request = {
            "model": adapter or self.model or None,
            "request_id": name,
            **prompt.content,
            "sampling_params": sampling,
        }
        # Who asks decides where a request goes next, so the endpoint itself tries once.
        answer = replace(self.endpoint, attempts=1).ask("POST", GENERATE, request)
        reply = reply_of(answer, int(sampling["max_tokens"]), self.vocabulary, adapter)
        if reply.finish is not Finish.ABORT:  # what was given up before it began has no tokens of its prompt
            prompt.check(answer)
        return reply

    def tops(self, prompt: ServedPrompt, count: int, adapter: str = "") -> list[TopRow]:
        """Return the most probable next tokens behind each token of a prompt, at temperature 1.

        All but the last row are told of the prompt, which never reads cached blocks; the last is of a generated token,
        which does.

        Raises:
            EndpointRefuses, EndpointUnwell: There is no such answer.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": count, "detokenize": False, "ignore_eos": True}
        request = {"model": adapter or self.model or None, **prompt.content}
        generated = self.endpoint.ask("POST", GENERATE, request | {"sampling_params": sampling})
        scored = self.endpoint.ask(
            "POST", GENERATE, request | {"sampling_params": {**sampling, "prompt_logprobs": count}}
        )
        prompt.check(scored)
        rows = tops_of(scored, len(prompt.tokens), count, self.vocabulary)
        return [*rows, next_tops_of(generated, count, self.vocabulary)]

    def abort(self, names: Sequence[str]) -> None:
        """End requests; what they have so far is their answer."""
        content = {"request_ids": [f"{_OF_GENERATE}{name}" for name in names]}
        try:
            replace(self.control, timeout_seconds=_ABORT_SECONDS, attempts=1).ask("POST", "/abort_requests", content)
        except (EndpointRefuses, EndpointUnwell):
            return  # a server that does not hear us answers nobody either

    def hang_up(self) -> None:
        """Close the connections whose answers are still awaited."""
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


class UnexpectedWeights(Exception):  # noqa: N818 - the name says what happened
    """A server answered with weights that were not pushed."""


class _PushedWeights(NamedTuple):
    """The weights of one push."""

    order: int
    """Of pushes; averages and weights of one version are two."""
    version: int


@dataclass
class Fleet:
    """The servers that have the present weights; threads may share it."""

    servers: list[VLLMServer] = field(default_factory=list)
    dead: dict[str, str] = field(default_factory=dict)
    """Address -> the reason why the server counts as dead."""
    pushes: dict[str, _PushedWeights] = field(default_factory=dict)
    """By the name of the weights; those that nothing on its way may be of are dropped."""
    newest: int = 0
    """The number of the last push."""
    warned: set[str] = field(default_factory=set)
    """Addresses that answered what is no answer."""
    adapter: str = ""
    """Name of the adapter that samples; "" where whole weights are pushed."""
    base: str = ""
    """Name of the weights beside which adapters lie."""
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
            UnexpectedWeights: None were, or they are older than the push of order `oldest`.
        """
        push = self.pushes.get(label)
        if push is None or push.order < oldest:
            raise UnexpectedWeights(
                f"samples from weights called {label!r}, which this run did not push to it, or replaced since"
            )
        return push.version

    def versions(self, reply: Reply, adapter: str, oldest: int) -> list[tuple[int, int]]:
        """Return (index of the first token, version of the weights) of each segment of a completion.

        Raises:
            UnexpectedWeights: Its weights were not pushed, or are older than the push of order `oldest`.
        """
        if not adapter:
            return [(start, self.version(label, oldest)) for start, label in reply.spans]
        for _, label in reply.spans:
            if label != self.base:
                raise UnexpectedWeights(f"samples beside a base called {label!r}, which this run did not push to it")
        return [(start, self.version(adapter, oldest)) for start, _ in reply.spans[:1]]

    def take(self, avoided: str = "") -> VLLMServer:
        """Return the living server with the fewest requests, and the one at an address only where no other lives.

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
            server = min(living, key=lambda candidate: (candidate.url == avoided, self.busy.get(candidate.url, 0)))
            self.busy[server.url] = self.busy.get(server.url, 0) + 1
            return server

    def release(self, server: VLLMServer) -> None:
        """Count a request of a server as done."""
        with self.lock:
            self.busy[server.url] -= 1

    def is_last(self, server: VLLMServer) -> bool:
        """Say whether no other server lives."""
        with self.lock:
            return [living.url for living in self.servers if living.url not in self.dead] == [server.url]

    def mistaken(self, server: VLLMServer, why: str) -> None:
        """Say once of each server that it answers what is no answer."""
        with self.lock:
            if server.url not in self.warned:
                self.warned.add(server.url)
                print(f"warning: the server at {server.url} {why}; another one is asked where there is one", flush=True)

    def bury(self, server: VLLMServer, why: str) -> None:
        """Ask a server no more until weights are pushed to it."""
        with self.lock:
            if server.url not in self.dead:
                self.dead[server.url] = why
                print(f"warning: the server at {server.url} {why}; its requests go to the others", flush=True)
