"""Servers before a run and before each push: whether they live, and whether they are what the run needs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import xxhash

import holdfast.patience
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.http_client import EndpointRefuses, EndpointUnwell
from holdfast.rollout.servers import BACKEND, ServerState, VLLMServer
from holdfast.training.run import ShardedModel

PROBE = "Sort 3 1 2: a's naïve  «x²» → \u65e5\u672c 10,000\n"
"""Servers cut the same text (`rollout/vllm_extension.py`)."""


def met(servers: Sequence[VLLMServer], sharded: ShardedModel, section: VLLMEngineConfig) -> list[ServerState]:
    """Return what all servers say of themselves, once they answer.

    Raises:
        ConfigError: One does not, or serves something else.
    """
    patience = holdfast.patience.current
    deadline = time.monotonic() + (patience.server_restart_seconds if section.start else 0.0)
    for server in servers:
        while not server.is_well():
            if time.monotonic() >= deadline:
                how = "it did not start; see its log" if section.start else "start it with `holdfast serve RUN.yaml`"
                raise ConfigError(f"rollout.engine.url: no server answers at {server.url}: {how}.")
            time.sleep(patience.server_look_seconds)
    return [server_state(server, sharded, section) for server in servers]


def living_of(servers: Sequence[VLLMServer], section: VLLMEngineConfig) -> list[VLLMServer]:
    """Return the servers that are well; one that we start ourselves is waited for where there is no other.

    Raises:
        RunStopped: None is.
    """
    patience = holdfast.patience.current
    deadline = time.monotonic() + (patience.server_restart_seconds if section.start else 0.0)
    while True:
        present = [server for server in servers if server.is_well()]
        for server in servers if present else ():
            if server not in present:
                print(f"warning: no server answers at {server.url}; it gets no weights and no requests", flush=True)
        if present:
            return present
        if time.monotonic() >= deadline:
            raise RunStopped(
                f"No server is left to push weights to ({', '.join(server.url for server in servers)}). Start them "
                "again; the same command then goes on from the last checkpoint."
            )
        time.sleep(patience.server_look_seconds)


def server_state(server: VLLMServer, sharded: ShardedModel, section: VLLMEngineConfig) -> ServerState:
    """Return what a server says of itself, if it fits the run.

    Raises:
        ConfigError: It does not.
    """
    try:
        state = server.state()
    except (EndpointRefuses, EndpointUnwell) as error:
        raise ConfigError(
            f"rollout.engine.url: {server.url} {error}. Rollouts need a vLLM that tells token ids, log-probabilities "
            "and the version of its weights, and takes ours; `holdfast serve RUN.yaml` starts one. SGLang and others "
            "do not."
        ) from error
    wrong = [why for right, why in _checks(state, sharded, section) if not right]
    if wrong:
        raise ConfigError(
            f"rollout.engine.url: the server at {server.url} {'; it '.join(wrong)}. `holdfast serve RUN.yaml` starts "
            "one that fits."
        )
    return state


def _checks(state: ServerState, sharded: ShardedModel, section: VLLMEngineConfig) -> tuple[tuple[bool, str], ...]:
    """Return whether each thing fits, and what to say where it does not."""
    facts, config = state.facts, sharded.setting.config
    vocabulary = int(sharded.origin.skeleton.config.get_text_config().vocab_size)
    dtype, longest = f"torch.{sharded.plan.compute_dtype}", config.data.max_length
    backend = BACKEND if section.transport == "files" else section.transport
    tokenizer, template = _tokenizer_digest(sharded.origin.tokenizer), _template_digest(sharded.origin.tokenizer)
    return (
        (facts["backend"] == backend, "takes no weights of ours (--weight-transfer-config)"),
        (facts["dtype"] == dtype, f"computes in {facts['dtype']}, and the trainer in {dtype} (--dtype)"),
        (
            facts["vocabulary"] == vocabulary,
            f"serves another model: its vocabulary has {facts['vocabulary']} tokens, the policy's {vocabulary}",
        ),
        (
            str(facts.get("version")).startswith(section.version),
            f"is vLLM {facts.get('version')}, and {section.version} is what was tested (tools/install_vllm.sh; "
            "rollout.engine.version says what to expect)",
        ),
        (
            None in {tokenizer, facts.get("tokenizer")} or tokenizer == facts["tokenizer"],
            "has another tokenizer than the policy, so it serves another model",
        ),
        (
            None in {template, facts.get("template")} or template == facts["template"],
            "has another chat template than the policy, so it serves another model",
        ),
        (
            state.longest >= longest,
            f"has a context of {state.longest} tokens, and data.max_length is {longest} (--max-model-len)",
        ),
        (
            facts["logprobs"] == "processed_logprobs",
            f"tells {facts['logprobs']}, which are of another temperature (--logprobs-mode processed_logprobs)",
        ),
        (not facts["tied"], "ties its output layer, which vLLM 0.32 does not update (--hf-overrides)"),
        (
            not (facts["experts"] and facts["device"] == "cpu"),
            "serves a mixture of experts on a CPU, where vLLM 0.32 gives wrong numbers after any push of experts; use "
            "rollout.engine: auto",
        ),
    )


@lru_cache(maxsize=1)  # a large vocabulary takes a tenth of a second, and every push asks
def _tokenizer_digest(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    vocabulary, probe = backend.get_vocab(), backend.encode(PROBE, add_special_tokens=False).ids
    return str(xxhash.xxh3_128_hexdigest(json.dumps([sorted(vocabulary.items()), probe]).encode()))


def _template_digest(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return str(xxhash.xxh3_128_hexdigest(template.encode())) if isinstance(template, str) else None
