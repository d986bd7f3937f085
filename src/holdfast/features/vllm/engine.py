"""Samples from vLLM servers over HTTP, without importing vLLM; `flight.py` has the requests that are on their way."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.features.vllm.flight import PendingCompletion, VLLMFlight
from holdfast.features.vllm.servers import Fleet, VLLMServer
from holdfast.rollout.engine import Conversation, Interrupted, Request, Sampled, TurnSource
from holdfast.rollout.sampling import Stops


class VLLMEngine:
    """Samples from servers; implements four protocols of `rollout/engine.py`.

    They are `RolloutEngine`, `AheadEngine`, `EpisodeEngine` and `AheadEpisodeEngine`.

    Args:
        section: The `rollout.engine` section of the run.
        servers: The servers of the section, reached and checked.
        stops: The conditions that end a completion.
    """

    def __init__(self, section: VLLMEngineConfig, servers: Sequence[VLLMServer], stops: Stops) -> None:
        self._section, self._stops = section, stops
        self.servers = tuple(servers)
        self._fleet = Fleet()
        self._flights: list[VLLMFlight] = []
        """All that may have requests on their way."""
        self._submitted: list[VLLMFlight] = []
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def expect(self, label: str, version: int) -> None:
        """Take samples from weights called `label`, which are of `version`."""
        self._fleet.expect(label, version, min(self.oldest_in_use, self._fleet.newest + 1))

    @property
    def oldest_in_use(self) -> int:
        """The order of the oldest push that completions on their way from this rank may be of; the next one's if none.

        Pushes are counted from 1 on all ranks alike.
        """
        return min((flight.oldest for flight in self._flights if not flight.is_done), default=self._fleet.newest + 1)

    def follow(self, pushed: Sequence[str]) -> None:
        """Sample from these servers from now on."""
        self._fleet.renew([server for server in self.servers if server.url in pushed])

    @property
    def in_flight(self) -> bool:
        """Whether requests of this rank are on their way."""
        self._flights = [flight for flight in self._flights if not flight.is_done]
        return bool(self._flights)

    @contextmanager
    def unproved(self) -> Iterator[None]:
        """Count nothing as finished that comes within the block, and give up what is on its way if the block fails."""
        flights = [flight for flight in self._flights if not flight.is_done]
        for flight in flights:
            flight.hold()
        try:
            yield
        except BaseException:
            for flight in flights:
                flight.give_up()
            raise
        for flight in flights:
            flight.release()

    def settle(self, interrupted: Interrupted) -> None:
        """Wait for what is on its way from this rank, so that no push meets it."""
        for flight in self._flights:
            flight.settle(interrupted)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        """Refuse: weights come by a push, which `features/vllm/publish.py` makes and proves."""
        raise NotImplementedError("weights are pushed by holdfast.features.vllm.publish")

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig, done: Sequence[Sampled] = ()) -> VLLMFlight:
        """Start to sample."""
        flight = VLLMFlight(self._fleet, self._section, self._items(requests), sampling, self._stops, done)
        self._flights.append(flight)
        return flight

    def _items(self, requests: Sequence[Request]) -> list[PendingCompletion]:
        items = []
        for request in requests:
            for index in range(len(request.seeds)):
                items.append(PendingCompletion(f"{self._mark}-{next(self._numbers)}", request, index))
        return items

    def converse(self, source: TurnSource, sampling: SamplingConfig, interrupted: Interrupted = lambda: False) -> None:
        """Sample until a source has no more turns; none waits for another one.

        Raises:
            RunStopped: As `collect`.
        """
        self.conversation(sampling)(source, interrupted)

    def conversation(self, sampling: SamplingConfig) -> Conversation:
        """Return what samples turns, in any thread; pushes meet its requests as those of other completions."""
        flight = self.begin((), sampling)
        flight.is_open = True

        def run(source: TurnSource, interrupted: Interrupted) -> None:
            try:
                while True:
                    requests = source.ready(wait=flight.has_returned_all)
                    flight.add(self._items(requests))
                    if flight.has_returned_all:
                        return
                    source.finished(flight.next_finished(interrupted))
            finally:
                flight.end()

        return run

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests, and ask for them at once."""
        self._submitted.append(self.begin(requests, sampling))

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place.

        Raises:
            RunStopped: No server is left, or one answers what cannot be trained on.
        """
        flights, self._submitted = self._submitted, []
        return [sampled for flight in flights for sampled in flight.collect(interrupted)]

    def sleep(self) -> bool:
        """Keep the weights: they are not in this process's memory."""
        return False

    def close(self) -> None:
        """Give up what is on its way, and close connections."""
        for flight in self._flights:
            flight.end()
        for server in self.servers:
            server.close()
