"""Publishes the policy's weights to vLLM servers, and opens the engine that samples from them.

Before a sample is drawn every server that lives has the present weights: their bytes are compared by hash on arrival,
and what the engine makes of them by a proof (`proof.py`). Before a run and before each push it is seen whether servers
live, and whether they are what the run needs (`checks.py`). Of a policy with LoRA a push is the adapters
(`adapters.py`) beside the frozen base, which every server process gets once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.adapters import AdapterPublisher, adapter_headers, adapter_settings, adapter_tensors
from holdfast.features.vllm.buckets import Leases, Publisher
from holdfast.features.vllm.checks import living_of, met, states_of
from holdfast.features.vllm.engine import VLLMEngine
from holdfast.features.vllm.lora import why_merged
from holdfast.features.vllm.proof import Proof, Prover, Suspects
from holdfast.features.vllm.responses import ServerState
from holdfast.features.vllm.servers import VLLMServer
from holdfast.features.vllm.speculation import Acceptance
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.models.files.conversion import Conversion, Header, plan_outgoing
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import converted_tensors, drained, headers_of, held_tensors
from holdfast.rollout.sampling import Stops
from holdfast.training.engines import PublishedEngine
from holdfast.training.run import Model
from holdfast.training.setup.model import image_side_of


class Outgoing(NamedTuple):
    """The names, shapes and dtypes of the tensors in a push."""

    conversions: tuple[Conversion, ...]
    headers: Mapping[str, Header]
    tie: tuple[str, str] | None
    """Names of the embedding, and of the output layer that is sent with its values."""


def outgoing(model: Model, *, merge: bool = True) -> Outgoing:
    """Plan a push: names as in an export, and an output layer of its own even where the model ties it.

    Args:
        model: The policy.
        merge: Whether adapters are merged into the matrices; otherwise the base alone is sent.
    """
    skeleton, dtype = model.blueprint.skeleton, _dtype(model)
    holdings = held_tensors(model.module, merge=merge)
    planned = plan_outgoing(skeleton, headers_of(holdings, dtype), model.blueprint.used_conversions)
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


def _stream(model: Model, plan: Outgoing, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on rank 0, on the CPU; elsewhere send their shards."""
    holdings = held_tensors(model.module, merge=merge)
    with converted_tensors(holdings.__getitem__, plan.conversions, _dtype(model), model.run.ranks) as tensors:
        for name, pieces in tensors:
            shards = list(pieces)
            tensor = (shards[0] if len(shards) == 1 else torch.cat(shards)).cpu()
            yield name, tensor
            if plan.tie is not None and name == plan.tie[0]:
                yield plan.tie[1], tensor


def _dtype(model: Model) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, model.plan.compute_dtype)
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
        self._adapters = AdapterPublisher(Path(section.folder)) if section.push == "adapters" else None
        self._shares = section.shares_gpus
        self._ranks: RankGroup | None = None
        """Ranks that sample, once something was pushed; servers that share their GPUs may be asleep between pushes."""
        self._with_base: frozenset[str] = frozenset()
        """Identities of the server processes that have the base of the adapters; on rank 0."""
        self._base_writes = -1
        """How often this rank's shards of the base had been written to when it was pushed last."""
        self._prover = prover
        self._identities: frozenset[str] = frozenset()
        """Of the server processes that took the last push; on rank 0."""
        self._proved: frozenset[str] = frozenset()
        """Of those of which a push was proved; on rank 0."""
        self._acceptance = Acceptance()
        self.proofs: list[Proof] = []
        """Of the last push that was proved; on rank 0."""

    def publish(self, model: Model) -> None:
        """Push the policy's present weights to every server that lives, and prove it; all ranks call this together.

        Raises:
            RunStopped: No server lives, one refuses the weights, or one says other numbers than the trainer.
        """
        if model.holds_averages:
            # Completions of a step that live through this push would go on from averages, as if from the policy.
            self.settle(model.run.interrupted)
        with self.unproved(), model.run.phase("push"):
            self._publish(model)

    def _publish(self, model: Model) -> None:
        start, ranks = time.perf_counter(), model.run.ranks
        if self._shares and self._ranks is not None:
            ranks.on_first_rank(lambda: self._ask_all("/wake_up"))
        self._ranks = ranks
        self._pushes += 1
        label = f"{self._mark_of_run}-{self._pushes}"
        self.expect(label, model.state.updates)
        on_their_way = any(ranks.gather(self.in_flight))
        if self._adapters is None:
            with ranks.together():
                pushed = self._pushed(model, label, on_their_way=on_their_way)
        else:
            pushed = self._pushed_adapter(model, self._adapters, label)
        servers, has_new = ranks.agree((pushed, not self._identities <= self._proved))
        pushing = time.perf_counter() - start
        self.follow(servers)
        adapter = label if self._adapters is not None else ""
        if has_new or self._is_proved():
            self._prove([server for server in self.servers if server.url in servers], model, adapter)
        if self._adapters is not None:
            self._sample_by(self._adapters, label, model)
        if self._pushes == 1 and model.run.world.is_first:
            worst = max((proof.difference for proof in self.proofs), default=float("nan"))
            print(
                f"weights pushed to {len(servers)} of {len(self.servers)} servers in {pushing:.1f} s and proved in "
                f"{time.perf_counter() - start - pushing:.1f} s: log-probabilities differ by {worst:.1e} (limit "
                f"{self._prover.limit:.1e})",
                flush=True,
            )

    def _prove(self, servers: Sequence[VLLMServer], model: Model, adapter: str) -> None:
        """Prove the last push on these servers; all ranks call this together."""
        if adapter and self._section.interrupt == "continue":
            # vLLM 0.32 on a CPU dies of log-probabilities of a prompt, which a proof asks for, where it decodes other
            # requests with an adapter at the same time. So all ranks wait for theirs.
            self.settle(model.run.interrupted)
            model.run.ranks.gather(None)
        with model.run.phase("proof"):
            self.proofs = self._prover.prove(model, servers, lambda wrong: self._suspects(model, wrong), adapter)
        self._proved |= self._identities

    def _suspects(self, model: Model, wrong: Sequence[str]) -> Suspects:
        """Return what servers compute with otherwise than the policy; all ranks call this together."""
        merge = self._adapters is None
        plan = outgoing(model, merge=merge)
        tensors = _stream(model, plan, merge=merge)
        if not model.run.world.is_first:
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

    def step_metrics(self) -> dict[str, float]:
        """Return the share of drafted tokens that servers accepted, where they decode by speculation."""
        assert self._ranks is not None  # something was pushed
        return self._ranks.on_first_rank(lambda: self._acceptance.since_last(self.servers))

    def sleep(self) -> bool:
        """Have servers on the ranks' GPUs give their memory back until the next push; return whether they do.

        Raises:
            RunStopped: One refuses; on all ranks, which call this together.
        """
        if not self._shares or self._ranks is None:
            return False
        self._ranks.on_first_rank(lambda: self._ask_all("/sleep", level="1"))
        return True

    def _ask_all(self, path: str, **query: str) -> None:
        for server in self.servers:
            try:
                server.post(path, **query)
            except EndpointRefuses as error:
                raise RunStopped(
                    f"The server at {server.url} {error}, asked for {path}. Start servers that share the ranks' GPUs "
                    "by `holdfast serve`; the same command then goes on from the last checkpoint."
                ) from error
            except EndpointUnwell:
                continue  # the next push sees that it died

    def close(self) -> None:
        """Close connections, and let other runs push."""
        super().close()
        if self._adapters is not None:
            self._adapters.close(self.servers)
        self._leases.give_back()

    def _pushed(self, model: Model, label: str, *, on_their_way: bool) -> list[str]:
        """Return the addresses of the servers that took the weights; on rank 0."""
        plan = outgoing(model)
        tensors = _stream(model, plan)
        if not model.run.world.is_first:
            for _ in tensors:
                pass
            return []
        try:
            states, dead = states_of(living_of(self.servers, self._section), model, self._section, self._leases)
            living = [server for server in self.servers if server.url in states]
            dead |= self._publisher.push(living, tensors, plan.headers, label, keep=on_their_way)
            self._identities = frozenset(state.identity for url, state in states.items() if url not in dead)
            return self._left(living, dead)
        finally:
            for _ in tensors:  # the other ranks are gathering; leaving now would make them wait
                pass

    def _pushed_adapter(self, model: Model, adapters: AdapterPublisher, label: str) -> list[str]:
        """Return the addresses of the servers that took the adapter; on rank 0. All ranks call this together."""
        ranks, is_first = model.run.ranks, model.run.world.is_first
        lora = model.run.config.model.lora
        assert lora is not None
        self._fleet.base = f"{self._mark_of_run}-base"
        states, dead = ranks.on_first_rank(
            lambda: states_of(living_of(self.servers, self._section), model, self._section, self._leases)
        )
        writes = _base_writes(model)
        if any(ranks.gather(writes != self._base_writes)):
            # The walk before step 1 pushes the base of model.path; a checkpoint that is loaded then may have another.
            self._base_writes, self._with_base = writes, frozenset()
        new = ranks.agree([url for url, state in states.items() if state.identity not in self._with_base])
        if new:
            plan = outgoing(model, merge=False)
            with ranks.together(), drained(_stream(model, plan, merge=False)) as tensors:
                if is_first:
                    lacking = [server for server in self.servers if server.url in new]
                    dead |= self._publisher.push(lacking, tensors, plan.headers, self._fleet.base)
                    self._with_base |= {states[url].identity for url in new if url not in dead}
        headers, pushed = adapter_headers(model), list[str]()
        with ranks.together(), drained(adapter_tensors(model)) as tensors:
            if is_first:
                living = [server for server in self.servers if server.url in states and server.url not in dead]
                settings = adapter_settings(model, lora)
                dead |= adapters.push(living, tensors, headers, settings, label, self._pushes)
                self._identities = frozenset(state.identity for url, state in states.items() if url not in dead)
                pushed = self._left(living, dead)
        return pushed

    def _sample_by(self, adapters: AdapterPublisher, label: str, model: Model) -> None:
        """Sample by an adapter that was proved, and unload those that no rank's completions use any more."""
        self._fleet.adapter = label
        ranks = model.run.ranks
        oldest = min(ranks.gather(min(self.oldest_in_use, self._pushes)))
        ranks.on_first_rank(lambda: adapters.unload(self.servers, oldest))

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


def _base_writes(model: Model) -> int:
    """Return how often this rank's shards of frozen parameters were written to; autograd counts that."""
    frozen = [value for value in sharded_parameters(model.module).values() if not value.requires_grad]
    return sum(local_part(value)._version for value in frozen)


def open_servers(model: Model, section: VLLMEngineConfig, stops: Stops) -> ServedEngine:
    """Reach the servers of a section, and see that they fit the run; all ranks call this together.

    Raises:
        ConfigError: One is not there, or serves something else.
    """
    ranks = model.run.ranks
    servers = ranks.on_all_ranks(lambda: [VLLMServer.of(url, section) for url in section.url])
    states = ranks.on_first_rank(lambda: met(servers, model, section))
    section = section.model_copy(update={"push": _content_of_pushes(model, section, states)})
    identified = [
        replace(
            server, model=state.model, vocabulary=int(state.facts["vocabulary"]), workers=int(state.facts["workers"])
        )
        for server, state in zip(servers, states, strict=True)
    ]
    mark = ranks.agree(f"{model.run.config.run.name}-{secrets.token_hex(4)}")
    block = max(int(state.facts["block"]) for state in states)
    longest = min(model.run.config.data.max_length, *(state.longest for state in states))
    side = ranks.on_all_ranks(lambda: image_side_of(model.run.config, model.blueprint))
    prover = Prover(section.tolerance, block, longest, side if isinstance(side, ImageSide) else None)
    return ServedEngine(section, identified, stops, mark, prover)


def _content_of_pushes(
    model: Model, section: VLLMEngineConfig, states: Sequence[ServerState]
) -> Literal["adapters", "weights"]:
    """Return what pushes send, and say so where adapters could not be sent alone.

    Raises:
        ConfigError: The run asks for adapters, and has none that vLLM can load.
    """
    lora = model.run.config.model.lora
    if section.push == "weights" or (lora is None and section.push == "auto"):
        return "weights"
    reason = why_merged(lora)
    if reason and section.push == "adapters":
        raise ConfigError(f"rollout.engine.push: adapters cannot be pushed alone: {reason}. Leave push out.")
    if not reason and any(state.facts["adapter_rank"] is None for state in states):
        reason = "a server takes no adapters (--enable-lora)"
    if reason and model.run.world.is_first:
        print(f"weights are pushed with their adapters merged: {reason}", flush=True)
    return "weights" if reason else "adapters"
