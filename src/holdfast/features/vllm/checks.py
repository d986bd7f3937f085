"""Reaches the servers of a run, and compares what each says of itself with what the run needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count

import holdfast.patience
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.buckets import Leases
from holdfast.features.vllm.lora import largest_rank, why_merged
from holdfast.features.vllm.responses import ServerState
from holdfast.features.vllm.servers import BACKEND, ROUTES, VLLMServer, template_digest, tokenizer_digest
from holdfast.http import EndpointRefuses, EndpointUnwell, pause_seconds
from holdfast.text.escaping import escaped
from holdfast.training.run import Model


def met(servers: Sequence[VLLMServer], model: Model, section: VLLMEngineConfig) -> list[ServerState]:
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
    states, dead = states_of(servers, model, section)
    if dead:
        raise ConfigError(
            f"rollout.engine.url: {'; '.join(f'the server at {url} {why}' for url, why in dead.items())}, although it "
            "said that it was well a moment before. Look at its log, and start it again by `holdfast serve RUN.yaml`."
        )
    for server in servers:
        _warn_of_version(server, str(states[server.url].facts["version"]), section.version)
    return [states[server.url] for server in servers]


def _warn_of_version(server: VLLMServer, version: str, expected: str) -> None:
    """Say that a server has another version than was run, and which of the routes that a run uses it lists."""
    if version.startswith(expected):
        return
    paths = server.paths()
    routes = "it does not list its routes"
    if paths is not None:
        missing = [route for route in ROUTES if route not in paths]
        routes = f"routes that it lists: {', '.join(route for route in ROUTES if route in paths) or 'none'}"
        routes += f"; that it does not: {', '.join(missing)}" if missing else ""
    print(
        f"warning: the server at {server.url} is vLLM {escaped(version)}, and {expected} is what was run "
        f"(rollout.engine.version); {routes}",
        flush=True,
    )


def states_of(
    servers: Sequence[VLLMServer], model: Model, section: VLLMEngineConfig, leases: Leases | None = None
) -> tuple[dict[str, ServerState], dict[str, str]]:
    """Return by address what servers say of themselves, and what was seen of those that died meanwhile.

    Args:
        servers: Well a moment ago.
        sharded, section: What they must fit.
        leases: Take them for this run; None: look alone.

    Raises:
        ConfigError: One does not fit the run, another run has it, or it has two addresses.
    """
    states: dict[str, ServerState] = {}
    dead: dict[str, str] = {}
    for server in servers:
        try:
            states[server.url] = _server_state(server, model, section)
            if leases is not None:
                leases.take(server)
        except EndpointUnwell as error:
            dead[server.url] = str(error)
            states.pop(server.url, None)
        except EndpointRefuses as error:  # to say who pushes to it
            raise ConfigError(
                f"rollout.engine.url: {server.url} {error}. `holdfast serve RUN.yaml` starts one that says "
                "who pushes to it."
            ) from error
    _refuse_twice(states)
    return states, dead


def _refuse_twice(states: Mapping[str, ServerState]) -> None:
    of_identity: dict[str, str] = {}
    for url, state in states.items():
        if state.identity in of_identity:
            raise ConfigError(
                f"rollout.engine.url: {of_identity[state.identity]} and {url} are addresses of one server. Name every "
                "server once."
            )
        of_identity[state.identity] = url


def living_of(servers: Sequence[VLLMServer], section: VLLMEngineConfig) -> list[VLLMServer]:
    """Return the servers that are well; where none is, they are waited for, longer where we start them ourselves.

    Raises:
        RunStopped: None is.
    """
    patience = holdfast.patience.current
    deadline = time.monotonic() + (patience.server_restart_seconds if section.start else 0.0)
    for tries in count(1):
        present = [server for server in servers if server.is_well()]
        for server in servers if present else ():
            if server not in present:
                print(f"warning: no server answers at {server.url}; it gets no weights and no requests", flush=True)
        if present:
            return present
        if time.monotonic() >= deadline and tries >= section.attempts:
            raise RunStopped(
                f"No server is left to push weights to ({', '.join(server.url for server in servers)}). Start them "
                "again; the same command then goes on from the last checkpoint."
            )
        time.sleep(pause_seconds(tries))
    raise AssertionError  # `count` does not end


def _server_state(server: VLLMServer, model: Model, section: VLLMEngineConfig) -> ServerState:
    """Return what a server says of itself, if it fits the run.

    Raises:
        ConfigError: It does not.
        EndpointUnwell: It does not answer.
    """
    try:
        state = server.state()
    except EndpointRefuses as error:
        raise ConfigError(
            f"rollout.engine.url: {server.url} {error}. Rollouts need a vLLM that tells token ids, log-probabilities "
            "and the version of its weights, and takes ours; `holdfast serve RUN.yaml` starts one. SGLang and others "
            "do not."
        ) from error
    wrong = [why for right, why in _checks(state, model, section) if not right]
    if wrong:
        raise ConfigError(
            f"rollout.engine.url: the server at {server.url} {'; it '.join(wrong)}. `holdfast serve RUN.yaml` starts "
            "one that fits."
        )
    return state


def _checks(state: ServerState, model: Model, section: VLLMEngineConfig) -> tuple[tuple[bool, str], ...]:
    """Return whether each thing fits, and what to say where it does not."""
    facts, config = state.facts, model.run.config
    vocabulary = int(model.blueprint.skeleton.config.get_text_config().vocab_size)
    dtype, longest = f"torch.{model.plan.compute_dtype}", config.data.max_length
    tokenizer, template = tokenizer_digest(model.blueprint.tokenizer), template_digest(model.blueprint.tokenizer)
    return (
        (facts["backend"] == BACKEND, "takes no weights of ours (--weight-transfer-config)"),
        (facts["dtype"] == dtype, f"computes in {facts['dtype']}, and the trainer in {dtype} (--dtype)"),
        (
            facts["vocabulary"] == vocabulary,
            f"serves another model: its vocabulary has {facts['vocabulary']} tokens, the policy's {vocabulary}",
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
        *_adapter_checks(facts["adapter_rank"], model, section),
        (not facts["tied"], "ties its output layer, which vLLM 0.32 does not update (--hf-overrides)"),
        (
            not (facts["experts"] and facts["device"] == "cpu"),
            "serves a mixture of experts on a CPU, where vLLM 0.32 gives wrong numbers after any push of experts; use "
            "rollout.engine: auto",
        ),
    )


def _adapter_checks(rank: int | None, model: Model, section: VLLMEngineConfig) -> tuple[tuple[bool, str], ...]:
    """Return the checks of a server's adapters: whether it takes any, and of which rank."""
    lora = model.run.config.model.lora
    if lora is None or why_merged(lora) or section.push == "weights":
        return ()
    instead = "or set rollout.engine.push: weights, which merges adapters"
    if rank is None:
        return ((section.push == "auto", f"takes no adapters (--enable-lora; {instead})"),)
    needed = largest_rank(lora)
    return (
        (needed <= rank, f"takes adapters up to rank {rank}, and model.lora has {needed} (--max-lora-rank; {instead})"),
    )
