"""Publishes the policy's weights to vLLM servers, and opens the engine that samples from them.

Before a sample is drawn every server that lives has the present weights: their bytes are compared by hash on arrival,
and what the engine makes of them by a proof (`proof.py`). Before a run and before each push it is seen whether servers
live, and whether they are what the run needs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import holdfast.patience
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.answers import ServerState
from holdfast.features.vllm.buckets import Leases, Publisher
from holdfast.features.vllm.engine import VLLMEngine
from holdfast.features.vllm.nccl import NCCLPublisher, refuse_nccl
from holdfast.features.vllm.proof import Proof, Prover, Suspects
from holdfast.features.vllm.servers import BACKEND, VLLMServer, template_digest, tokenizer_digest
from holdfast.http import EndpointRefuses, EndpointUnwell, pause_seconds
from holdfast.models.files.conversion import Conversion, Header, plan_outgoing
from holdfast.parallel.stream import converted_tensors, headers_of, held_tensors
from holdfast.rollout.sampling import Stops
from holdfast.training.engines import PublishedEngine
from holdfast.training.run import ShardedModel


class Outgoing(NamedTuple):
    """The names, shapes and dtypes of the tensors in a push."""

    conversions: tuple[Conversion, ...]
    headers: Mapping[str, Header]
    tie: tuple[str, str] | None
    """Names of the embedding, and of the output layer that is sent with its values."""


def outgoing(sharded: ShardedModel) -> Outgoing:
    """Plan a push: names as in an export, and an output layer of its own even where the model ties it."""
    skeleton, dtype = sharded.origin.skeleton, _dtype(sharded)
    planned = plan_outgoing(skeleton, headers_of(held_tensors(sharded.model), dtype), sharded.origin.used_conversions)
    headers = {name: header for conversion in planned for name, header in conversion.targets.items()}
    inputs, outputs = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if outputs is None or outputs.weight is not inputs.weight:
        return Outgoing(tuple(planned), headers, None)
    of_module = {id(module): name for name, module in skeleton.named_modules()}
    source, head = f"{of_module[id(inputs)]}.weight", f"{of_module[id(outputs)]}.weight"
    embedding = next(next(iter(plan.targets)) for plan in planned if source in plan.sources or head in plan.sources)
    # vLLM 0.32 leaves the old values packed in a tied head, so servers hold it as a matrix of its own.
    ordered: dict[str, Header] = {}
    for name, header in headers.items():  # as they are streamed
        ordered |= {name: header, head: header} if name == embedding else {name: header}
    return Outgoing(tuple(planned), ordered, (embedding, head))


def _stream(sharded: ShardedModel, plan: Outgoing, *, on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on rank 0, on the CPU or where they are; elsewhere send their shards."""
    holdings, is_first = held_tensors(sharded.model), sharded.setting.world.is_first
    for name, pieces in converted_tensors(holdings, plan.conversions, _dtype(sharded), keep=is_first):
        shards = list(pieces)
        tensor = shards[0] if len(shards) == 1 else torch.cat(shards)
        tensor = tensor if on_device else tensor.cpu()
        yield name, tensor
        if plan.tie is not None and name == plan.tie[0]:
            yield plan.tie[1], tensor


def _dtype(sharded: ShardedModel) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    return dtype


class ServedEngine(VLLMEngine, PublishedEngine):
    """An engine of vLLM servers that receive the policy's weights. Every rank builds it, and rank 0 pushes.

    Args:
        section: The `rollout.engine` section of the run.
        servers: The servers of the section, reached and checked.
        stops: The conditions that end a completion.
        mark: A random text that all ranks share and each start draws anew, so that no two pushes have one name.
        prover: Compares the servers with the trainer after each push.
    """

    def __init__(
        self,
        section: VLLMEngineConfig,
        servers: Sequence[VLLMServer],
        stops: Stops,
        mark: str,
        prover: Prover,
    ) -> None:
        super().__init__(section, servers, stops)
        self._mark_of_run, self._pushes = mark, 0
        self._publisher, self._leases = Publisher(Path(section.folder), section.bucket_mib), Leases(mark)
        self._nccl = NCCLPublisher() if section.transport == "nccl" else None
        self._prover = prover
        self._identities: frozenset[str] = frozenset()
        """Of the server processes that took the last push; on rank 0."""
        self._proved: frozenset[str] = frozenset()
        """Of those of which a push was proved; on rank 0."""
        self.proofs: list[Proof] = []
        """Of the last push that was proved; on rank 0."""

    def publish(self, sharded: ShardedModel) -> None:
        """Push the policy's present weights to every server that lives, and prove it; all ranks call this together.

        Raises:
            RunStopped: No server lives, one refuses the weights, or one says other numbers than the trainer.
        """
        if sharded.holds_averages:
            # Completions of a step that live through this push would go on from averages, as if from the policy.
            self.settle(sharded.setting.interrupted)
        with self.unproved():
            self._publish(sharded)

    def _publish(self, sharded: ShardedModel) -> None:
        start, ranks = time.perf_counter(), sharded.setting.ranks
        self._pushes += 1
        label = f"{self._mark_of_run}-{self._pushes}"
        self.expect(label, sharded.state.updates)
        on_their_way = any(ranks.gather(self.in_flight))
        with ranks.together():
            pushed = self._pushed(sharded, label, on_their_way=on_their_way)
        servers, has_new = ranks.agree((pushed, not self._identities <= self._proved))
        self.follow(servers)
        if has_new or self._is_proved():
            present = [server for server in self.servers if server.url in servers]
            self.proofs = self._prover.prove(sharded, present, lambda wrong: self._suspects(sharded, wrong))
            self._proved |= self._identities
        if self._pushes == 1 and sharded.setting.world.is_first:
            worst = max((proof.difference for proof in self.proofs), default=float("nan"))
            print(
                f"weights pushed to {len(servers)} of {len(self.servers)} servers and proved in "
                f"{time.perf_counter() - start:.1f} s: log-probabilities differ by {worst:.1e} (limit "
                f"{self._prover.limit:.1e})",
                flush=True,
            )

    def _suspects(self, sharded: ShardedModel, wrong: Sequence[str]) -> Suspects:
        """Return what servers compute with otherwise than the policy; all ranks call this together."""
        plan = outgoing(sharded)
        tensors = _stream(sharded, plan)
        if not sharded.setting.world.is_first:
            for _ in tensors:
                pass
            return {}
        try:
            return self._publisher.inspect(
                [server for server in self.servers if server.url in wrong], tensors, plan.headers
            )
        finally:
            for _ in tensors:  # the other ranks are gathering
                pass

    def close(self) -> None:
        """Close connections, and let other runs push."""
        super().close()
        self._leases.give_back()

    def _pushed(self, sharded: ShardedModel, label: str, *, on_their_way: bool) -> list[str]:
        """Return the addresses of the servers that took the weights; on rank 0."""
        plan = outgoing(sharded)
        tensors = _stream(sharded, plan, on_device=self._nccl is not None)
        if not sharded.setting.world.is_first:
            for _ in tensors:
                pass
            return []
        try:
            states, dead = _states_of(_living_of(self.servers, self._section), sharded, self._section, self._leases)
            living = [server for server in self.servers if server.url in states]
            if self._nccl is None:
                dead |= self._publisher.push(living, tensors, plan.headers, label, keep=on_their_way)
            elif living:
                members = [_member(server, states[server.url]) for server in living]
                self._nccl.push(members, tensors, plan.headers, label, keep=on_their_way)
            self._identities = frozenset(state.identity for url, state in states.items() if url not in dead)
            return self._left(living, dead)
        finally:
            for _ in tensors:  # the other ranks are gathering; leaving now would make them wait
                pass

    def _left(self, living: Sequence[VLLMServer], dead: Mapping[str, str]) -> list[str]:
        """Name servers that died in a push, and return the others' addresses.

        Raises:
            RunStopped: There are none.
        """
        for url, why in dead.items():
            print(f"warning: the server at {url} {why} while weights were pushed to it, and is left out", flush=True)
        pushed = [server.url for server in living if server.url not in dead]
        if not pushed:
            raise RunStopped(f"No server took the weights: {'; '.join(f'{url} {why}' for url, why in dead.items())}.")
        return pushed

    def _is_proved(self) -> bool:
        """Say whether the last push is one that is proved, whichever servers took it."""
        every = self._section.prove
        # The first push is the walk's before step 1, which knows no checkpoint; what a run loads comes with the second.
        if every == "every_push" or self._pushes <= 2:
            return True
        return every != "start" and (self._pushes - 1) % int(every) == 0


def _member(server: VLLMServer, state: ServerState) -> tuple[VLLMServer, str, int]:
    return server, state.identity, int(state.facts["workers"])


def open_servers(sharded: ShardedModel, section: VLLMEngineConfig, stops: Stops) -> ServedEngine:
    """Reach the servers of a section, and see that they fit the run; all ranks call this together.

    Raises:
        ConfigError: One is not there, or serves something else.
    """
    ranks = sharded.setting.ranks
    if section.transport == "nccl":
        ranks.on_all_ranks(lambda: refuse_nccl(sharded.setting.world))
    servers = ranks.on_all_ranks(lambda: [VLLMServer.of(url, section) for url in section.url])
    states = ranks.on_first_rank(lambda: _met(servers, sharded, section))
    identified = [
        replace(server, model=state.model, vocabulary=int(state.facts["vocabulary"]))
        for server, state in zip(servers, states, strict=True)
    ]
    mark = ranks.agree(f"{sharded.setting.config.run.name}-{secrets.token_hex(4)}")
    block, longest = max(int(state.facts["block"]) for state in states), min(state.longest for state in states)
    return ServedEngine(section, identified, stops, mark, Prover(section.tolerance, block, longest))


def _met(servers: Sequence[VLLMServer], sharded: ShardedModel, section: VLLMEngineConfig) -> list[ServerState]:
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
    states, dead = _states_of(servers, sharded, section)
    if dead:
        raise ConfigError(
            f"rollout.engine.url: {'; '.join(f'the server at {url} {why}' for url, why in dead.items())}, although it "
            "said that it was well a moment before. Look at its log, and start it again by `holdfast serve RUN.yaml`."
        )
    return [states[server.url] for server in servers]


def _states_of(
    servers: Sequence[VLLMServer], sharded: ShardedModel, section: VLLMEngineConfig, leases: Leases | None = None
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
            states[server.url] = _server_state(server, sharded, section)
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


def _living_of(servers: Sequence[VLLMServer], section: VLLMEngineConfig) -> list[VLLMServer]:
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


def _server_state(server: VLLMServer, sharded: ShardedModel, section: VLLMEngineConfig) -> ServerState:
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
    tokenizer, template = tokenizer_digest(sharded.origin.tokenizer), template_digest(sharded.origin.tokenizer)
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
