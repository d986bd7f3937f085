"""One server of vLLM, and what is asked of it: token ids in and out, its state, and what it takes in a push.

Nothing here imports vLLM. One request is one completion, with its own seed. What a server answers is checked before it
counts (`answers.py`): 200 with fewer tokens than were asked for, tokens of weights that nobody pushed, and tokens
without their log-probabilities are all answers that a server gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.http_client import Endpoint, EndpointRefuses, EndpointUnwell, api_key
from holdfast.rollout.answers import (
    GENERATE,
    LARGEST_VOCABULARY,
    MODELS,
    RPC,
    Reply,
    ServerState,
    TopRow,
    next_tops_of,
    reply_of,
    server_state_of,
    tops_of,
)

BACKEND = "holdfast"
"""Of the transfer, as `vllm_extension.py` registers it."""
_OF_GENERATE = "generate-tokens-"
"""What that route puts before a request's name."""
_LOOK_SECONDS = 5.0
"""For a server to say that it is well."""


@dataclass(frozen=True)
class VLLMServer:
    """Asks one server; safe to share between threads."""

    url: str
    endpoint: Endpoint
    """For what may be asked twice; its connections stay open."""
    control: Endpoint
    """For pushes."""
    model: str = ""
    vocabulary: int = LARGEST_VOCABULARY
    """Tokens that there are; a completion with another one is none."""

    @classmethod
    def of(cls, url: str, section: VLLMEngineConfig, name: str = "rollout.engine") -> VLLMServer:
        """Return the server at an address of a section.

        Raises:
            ConfigError: The variable of the key is not set.
        """
        key = api_key(section.api_key_variable, name)
        # Who asks decides where a request goes next, so the endpoint itself tries once.
        endpoint = Endpoint(url, key, section.timeout_seconds, attempts=1, keeps_open=True)
        control = Endpoint(url, key, section.timeout_seconds, attempts=1, may_be_empty=True)
        return cls(url, endpoint, control, section.model or "")

    def is_well(self) -> bool:
        """Return whether the server and the engine behind it live."""
        return replace(self.control, timeout_seconds=_LOOK_SECONDS).is_well("/health")

    def state(self) -> ServerState:
        """Return what the server says of itself.

        Raises:
            EndpointRefuses, EndpointUnwell: It does not, or it is no vLLM that was started for us.
        """
        listed = self.control.ask("GET", MODELS)
        described = self.control.ask("POST", RPC, {"method": "holdfast_identity"})
        return server_state_of(listed, described, self.model)

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
        return reply_of(self.endpoint.ask("POST", GENERATE, asked), int(sampling["max_tokens"]), self.vocabulary)

    def tops(self, prompt: Sequence[int], count: int) -> list[TopRow]:
        """Return the most probable next tokens behind each token of a prompt, at temperature 1.

        All but the last row are told of the prompt, which never reads cached blocks; the last is of a generated token,
        which does.

        Raises:
            EndpointRefuses, EndpointUnwell: There is no such answer.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": count, "detokenize": False, "ignore_eos": True}
        asked = {"model": self.model or None, "token_ids": list(prompt)}
        generated = self.endpoint.ask("POST", GENERATE, asked | {"sampling_params": sampling})
        scored = self.endpoint.ask(
            "POST", GENERATE, asked | {"sampling_params": {**sampling, "prompt_logprobs": count}}
        )
        rows = tops_of(scored, len(prompt), count, self.vocabulary)
        return [*rows, next_tops_of(generated, count, self.vocabulary)]

    def abort(self, names: Sequence[str]) -> None:
        """End requests; what they have so far is their answer."""
        try:
            self.post("/abort_requests", {"request_ids": [f"{_OF_GENERATE}{name}" for name in names]})
        except (EndpointRefuses, EndpointUnwell):
            return  # a server that does not hear us answers nobody either

    def close(self) -> None:
        """Close connections."""
        self.endpoint.close()


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
