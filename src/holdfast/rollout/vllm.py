"""Sample from servers of vLLM over HTTP, without importing vLLM.

Each completion is a request of its own with its own seed, so it does not matter which server answers it. A server that
dies in the middle is noticed by its silence, and its requests are asked of the others with the same seeds; where none
is left, the step ends with their names. A completion counts only if it says that it is of the weights that were pushed.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.http_client import EndpointRefuses, EndpointUnwell
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.sampling import Stops
from holdfast.rollout.servers import Reply, VLLMServer, sampling_words
from holdfast.types import Finish

_LOOK_SECONDS = 0.2
"""Between two looks whether anybody still wants the completions."""
_LARGEST_SEED = 2**63 - 1


class _Item(NamedTuple):
    """One completion that is asked for."""

    name: str
    request: Request
    place: int


@dataclass
class _Fleet:
    """The servers that have the present weights; safe to share between threads."""

    servers: list[VLLMServer]
    dead: dict[str, str] = field(default_factory=dict)
    """Address -> what was seen."""
    busy: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

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

    def bury(self, server: VLLMServer, why: str) -> None:
        """Ask a server no more until weights are pushed to it."""
        with self.lock:
            if server.url not in self.dead:
                self.dead[server.url] = why
                print(f"warning: the server at {server.url} {why}; its requests go to the others", flush=True)


class VLLMEngine:
    """Samples from servers; behind `rollout/engine.py: RolloutEngine`.

    Args:
        section: The servers, and how they are asked.
        servers: The same, reached and checked.
        stops: What ends a completion.
    """

    def __init__(self, section: VLLMEngineConfig, servers: Sequence[VLLMServer], stops: Stops) -> None:
        self._section, self._stops = section, stops
        self.servers = tuple(servers)
        self._fleet = _Fleet([])
        self._versions: dict[str, int] = {}
        self._waiting: list[_Item] = []
        self._sampling = SamplingConfig()
        self._mark = secrets.token_hex(4)
        self._count = 0
        self._given_up = threading.Event()

    def follow(self, pushed: Sequence[str], label: str, version: int) -> None:
        """Sample from these servers from now on, whose weights are called `label` and are of `version`."""
        self._fleet = _Fleet([server for server in self.servers if server.url in pushed])
        self._versions[label] = version

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        """Refuse: weights come by a push, which `training/publishing.py` makes and proves."""
        raise NotImplementedError("weights are pushed by holdfast.training.publishing")

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests; all that wait together are sampled alike."""
        for request in requests:
            for place in range(len(request.seeds)):
                self._count += 1
                self._waiting.append(_Item(f"{self._mark}-{self._count}", request, place))
        self._sampling = sampling

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place.

        Raises:
            RunStopped: No server is left, or one answers what cannot be trained on.
        """
        items, self._waiting = self._waiting, []
        self._given_up.clear()
        words = sampling_words(self._sampling, sorted(self._stops.tokens))
        with ThreadPoolExecutor(self._section.requests, thread_name_prefix="holdfast-vllm") as threads:
            futures = {threads.submit(self._completed, item, words): item for item in items}
            try:
                self._await(futures, interrupted)
                done = [(item, future.result()) for future, item in futures.items()]
            finally:
                self._given_up.set()
                for future in futures:
                    future.cancel()
        order = {id(item): number for number, item in enumerate(items)}
        done.sort(key=lambda pair: order[id(pair[0])])
        return [self._sampled(item, reply) for item, reply in done]

    def sleep(self) -> bool:
        """Keep the weights: they are not in this process's memory."""
        return False

    def close(self) -> None:
        """Close connections."""
        for server in self.servers:
            server.close()

    def _await(self, futures: dict[Future[Reply], _Item], interrupted: Interrupted) -> None:
        """Wait for all requests, or end them; the first error ends the wait."""
        left = set(futures)
        while left:
            done, left = wait(left, timeout=_LOOK_SECONDS)
            for future in done:
                if future.exception() is not None:
                    self._end(futures, left)
                    return
            if left and not self._given_up.is_set() and interrupted():
                self._end(futures, left)

    def _end(self, futures: dict[Future[Reply], _Item], left: set[Future[Reply]]) -> None:
        self._given_up.set()
        names = [futures[future].name for future in left]
        for server in self._fleet.servers:
            if server.url not in self._fleet.dead:
                server.abort(names)

    def _completed(self, item: _Item, words: dict[str, Any]) -> Reply:
        """Return one completion, from whichever server gives it."""
        sampling = words | {"seed": item.request.seeds[item.place] & _LARGEST_SEED}
        prompt, tries = item.request.prompt.tolist(), 0
        while not self._given_up.is_set():
            server = self._fleet.take()
            try:
                reply = server.complete(item.name, prompt, sampling)
                if self._given_up.is_set() or reply.finish is not Finish.ABORT:
                    return self._of_our_weights(reply)
                raise EndpointUnwell("ended a completion that nobody had given up")  # noqa: TRY301
            except EndpointUnwell as error:
                tries += 1
                if not server.is_well():
                    self._fleet.bury(server, str(error))
                elif tries >= self._section.attempts:
                    raise RunStopped(
                        f"The server at {server.url} {error}, asked {tries} times. Mend it; the same command then goes "
                        "on from the last checkpoint."
                    ) from error
            except _OtherWeights as error:
                self._fleet.bury(server, str(error))  # it was started again, or somebody else pushes to it
            except EndpointRefuses as error:
                raise RunStopped(f"The server at {server.url} {error}.") from error
            finally:
                self._fleet.release(server)
        return Reply(np.zeros(0, np.int64), np.zeros(0, np.float32), Finish.ABORT, ())

    def _of_our_weights(self, reply: Reply) -> Reply:
        for _, label in reply.spans:
            if label not in self._versions:
                raise _OtherWeights(f"samples from weights called {label!r}, which this run did not push to it")
        return reply

    def _sampled(self, item: _Item, reply: Reply) -> Sampled:
        tokens, logprobs, finish = reply.tokens, reply.logprobs, reply.finish
        stops = self._stops.with_texts(self._sampling.stop)
        end = stops.end(tokens.tolist(), 0)
        if end is not None:  # a text that ends a completion is looked for here
            tokens, logprobs, finish = tokens[:end], logprobs[:end], Finish.STOP
        elif finish is Finish.STOP:
            raise RunStopped(
                f"A server ended a completion at token {tokens[-1:].tolist()}, which is no end of this run's. Start "
                "servers by `holdfast serve`, which gives vLLM no other rules of its own."
            )
        parts = tuple((start, self._versions[label]) for start, label in reply.spans)
        first = parts[0][1] if parts else -1
        changes = parts if len({version for _, version in parts}) > 1 else ()
        unscored = int(np.count_nonzero(np.isnan(logprobs)))
        return Sampled(item.request.request_id, item.place, tokens, logprobs, finish, first, None, changes, unscored)


class _OtherWeights(Exception):  # noqa: N818 - the name says what happened
    """A completion of weights that were not pushed."""
