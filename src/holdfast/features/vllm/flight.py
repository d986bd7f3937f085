"""Requests to vLLM servers that are on their way, on threads of their own.

Each completion is a request of its own with its own seed, so it does not matter which server answers it. A server that
dies in the middle is noticed by its silence, and its requests are asked of the others with the same seeds; where none
is left, the step ends with their names. A completion counts only if it says that it is of the weights that were pushed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.responses import Reply
from holdfast.features.vllm.servers import Fleet, UnexpectedWeights, VLLMServer, sampling_words
from holdfast.http import EndpointMistaken, EndpointRefuses, EndpointUnwell, pause_seconds
from holdfast.rollout.engine import Interrupted, Request, Sampled
from holdfast.rollout.sampling import Stops
from holdfast.types import Finish

_LOOK_SECONDS = 0.2
"""Between two looks whether anybody still wants the completions."""
_TURN_SECONDS = 0.01
"""Longest wait for a turn before it is seen whether an environment has answered."""
_GRACE_SECONDS = 0.5
"""For requests that were ended to answer with what they have, before they are hung up on."""
_THREADS_SECONDS = 1.0
"""For threads to notice that."""
_LARGEST_SEED = 2**63 - 1


class PendingCompletion(NamedTuple):
    """One completion that was requested and has not arrived."""

    name: str
    request: Request
    seed_index: int


class VLLMFlight:
    """Requests to servers on separate threads; implements `Flight` of `rollout/engine.py`.

    Args:
        fleet: The servers.
        section: The `rollout.engine` section of the run.
        items: The completions that are requested.
        sampling: Temperature and support of all requests.
        stops: The conditions that end a completion.
        done: Completions that exist already and are not requested.
    """

    def __init__(  # noqa: PLR0913 - what is asked, of whom, and how
        self,
        fleet: Fleet,
        section: VLLMEngineConfig,
        items: Sequence[PendingCompletion],
        sampling: SamplingConfig,
        stops: Stops,
        done: Sequence[Sampled] = (),
    ) -> None:
        self._fleet, self._section, self._sampling, self._stops = fleet, section, sampling, stops
        self.oldest = fleet.newest
        """Order of the push before it began: no completion is of older weights, however long it waits."""
        self._items = list(items)
        self._done = {(sampled.request_id, sampled.place): sampled for sampled in done}
        self._asked: dict[str, VLLMServer] = {}
        """By address."""
        self._returned: set[Future[Sampled]] = set()
        """Those that `next_finished` has returned."""
        self.is_open = False
        """Whether further completions may be asked for, and `next_finished` returns them, until it ends."""
        self._held: list[PendingCompletion] = []
        """Those that were added while weights are pushed and not yet proved."""
        self._adding = threading.Lock()
        self._before_push: list[Sampled] | None = None
        self._given_up = threading.Event()
        self._interruptions = 0
        """How often completions were broken off, to be sampled again from newer weights."""
        self._request_names: dict[str, str] = {}
        """Of each completion, the name of the request that is on its way: what was broken off is asked by another."""
        self._may_ask = threading.Event()
        """Set unless weights are being pushed and what was broken off waits for them."""
        self._may_ask.set()
        self._parameters = sampling_words(sampling, sorted(stops.tokens))
        self._threads = ThreadPoolExecutor(section.requests, thread_name_prefix="holdfast-vllm")
        self._futures: dict[Future[Sampled], PendingCompletion] = {}
        self._ask([item for item in items if (item.request.request_id, item.seed_index) not in self._done])

    def add(self, items: Sequence[PendingCompletion]) -> None:
        """Ask for further completions; while weights are pushed and not yet proved, ask once they are."""
        with self._adding:
            self._items += items
            if self._before_push is None:
                self._ask(items)
            else:
                self._held += items

    def _ask(self, items: Sequence[PendingCompletion]) -> None:
        self._futures |= {self._threads.submit(self._completed, item, self._parameters): item for item in items}

    def next_finished(self, interrupted: Interrupted) -> list[Sampled]:
        """Return completions that have come since the last call, after a moment's wait for one; all once interrupted.

        While weights are pushed and not yet proved, nothing is returned.

        Raises:
            RunStopped: As `collect`; or another thread has given the flight up.
        """
        pending = set(self._futures) - self._returned  # a push that ends may add some meanwhile
        done, left = wait(pending, _TURN_SECONDS, FIRST_COMPLETED)
        is_interrupted = interrupted()
        if self._given_up.is_set() and not is_interrupted:
            raise RunStopped("The completions of an episode were given up, since the run ends.")
        if self._before_push is not None and not is_interrupted:
            time.sleep(_TURN_SECONDS)
            return []
        if left and is_interrupted:
            self._give_up(left)
            done = pending
        self._returned |= done
        finished = [future.result() if future.done() else _aborted(self._futures[future]) for future in done]
        return sorted(finished, key=lambda sampled: (sampled.request_id, sampled.place))

    def finished(self) -> list[Sampled]:
        """Return those that are done; while weights are pushed and not yet proved, those that were done before."""
        return self._finished() if self._before_push is None else self._before_push

    def hold(self) -> None:
        """Count nothing as finished from here on: what comes may be of weights that fail their proof."""
        with self._adding:
            self._before_push = self._finished()
        if self._section.interrupt == "abandon":
            self._may_ask.clear()
            self._interruptions += 1
            self._break_off([future for future in list(self._futures) if not future.done()])

    def release(self) -> None:
        """Count again what comes: the weights are proved."""
        with self._adding:
            self._before_push = None
            self._may_ask.set()
            self._ask(self._held)
            self._held = []

    def _finished(self) -> list[Sampled]:
        done = {
            (item.request.request_id, item.seed_index): future.result()
            for future, item in list(self._futures.items())
            if future.done() and not future.cancelled() and future.exception() is None
        }
        complete = {key: sampled for key, sampled in done.items() if sampled.finish is not Finish.ABORT}
        return self._in_order(self._done | complete)

    @property
    def has_returned_all(self) -> bool:
        """Whether `next_finished` has returned every completion that was asked for."""
        return not self._held and len(self._returned) == len(self._futures)

    @property
    def is_done(self) -> bool:
        """Whether no request is on its way, and none will be."""
        return not self.is_open and all(future.done() for future in list(self._futures))

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions, by request and place.

        Raises:
            RunStopped: No server is left, or one answers what cannot be trained on.
        """
        try:
            self._await(interrupted)
            done = {
                (item.request.request_id, item.seed_index): future.result() if future.done() else _aborted(item)
                for future, item in self._futures.items()
            }
        finally:
            self.end()
        return self._in_order(self._done | done)

    def settle(self, interrupted: Interrupted) -> None:
        """Wait for what is on its way, which `collect` returns later, errors included."""
        self._await(interrupted)
        while self.is_open and self._before_push is None and not self._given_up.is_set():
            time.sleep(_TURN_SECONDS)  # turns that are not asked for yet
            if interrupted():
                self.give_up()

    def give_up(self) -> None:
        """End all requests without waiting for their completions."""
        pending = [future for future in list(self._futures) if not future.done()]
        if pending:
            self._give_up(pending)
        self._given_up.set()  # those that no thread has begun end at once
        self._may_ask.set()

    def end(self) -> None:
        """Give up, and see the threads end."""
        self.is_open = False
        self.give_up()
        self._threads.shutdown(wait=self.is_done, cancel_futures=True)

    def _in_order(self, done: Mapping[tuple[int, int], Sampled]) -> list[Sampled]:
        keys = [(item.request.request_id, item.seed_index) for item in self._items]
        return [done[key] for key in keys if key in done]

    def _await(self, interrupted: Interrupted) -> None:
        """Wait for all requests, or end them; the first error ends the wait."""
        pending = set(self._futures)
        while pending and not self._given_up.is_set():
            done, pending = wait(pending, timeout=_LOOK_SECONDS)
            failed = any(future.exception() is not None for future in done if not future.cancelled())
            if failed or (pending and interrupted()):
                self._give_up(pending)

    def _give_up(self, pending: Collection[Future[Sampled]]) -> None:
        """End requests, and wait a moment for their threads; a server that does not answer is hung up on."""
        self._given_up.set()
        self._may_ask.set()
        self._break_off(pending)
        deadline = time.monotonic() + _GRACE_SECONDS + _THREADS_SECONDS
        pending = wait(pending, timeout=_GRACE_SECONDS).not_done
        while pending and time.monotonic() < deadline:
            for server in self._asked.values():
                server.hang_up()  # one that was about to ask again has a connection by the next round
            pending = wait(pending, timeout=_LOOK_SECONDS).not_done

    def _break_off(self, pending: Collection[Future[Sampled]]) -> None:
        items = [self._futures[future] for future in pending]
        names = [self._request_names[item.name] for item in items if item.name in self._request_names]
        living = [server for server in self._fleet.servers if server.url not in self._fleet.dead]
        if living and names:
            with ThreadPoolExecutor(len(living)) as threads:
                list(threads.map(lambda server: server.abort(names), living))

    def _completed(self, item: PendingCompletion, parameters: dict[str, Any]) -> Sampled:
        """Return one completion, from whichever server gives it."""
        sampling = parameters | {"seed": item.request.seeds[item.seed_index] & _LARGEST_SEED}
        prompt, tries, avoided = ServedPrompt.of(item.request), 0, ""
        while not self._given_up.is_set():
            self._may_ask.wait()
            server, interruptions = self._fleet.take(avoided), self._interruptions
            self._asked[server.url], adapter = server, self._fleet.adapter
            name = self._request_names[item.name] = f"{item.name}-{interruptions}"
            try:
                reply = server.complete(name, prompt, sampling, adapter)
                if self._given_up.is_set() or reply.finish is not Finish.ABORT:
                    return self._sampled(item, reply, adapter)
                if interruptions != self._interruptions:
                    continue
                raise EndpointUnwell("ended a completion that nobody had given up")  # noqa: TRY301
            except EndpointUnwell as error:
                tries += 1
                self._bury_or_wait(server, error, tries)
            except UnexpectedWeights as error:
                self._fleet.bury(server, str(error))  # it was started again, or somebody else pushes to it
            except EndpointMistaken as error:  # one failed request: another server may do better
                tries, avoided = tries + 1, server.url
                self._fleet.mistaken(server, str(error))
                if tries >= self._section.attempts:
                    raise RunStopped(
                        f"The server at {server.url} {error}; one completion was asked for {tries} times. Start "
                        "servers by `holdfast serve`, with the flags that runs need; the same command then goes on "
                        "from the last checkpoint."
                    ) from error
            except EndpointRefuses as error:
                if adapter and not server.has_adapter(adapter):
                    self._fleet.bury(server, f"has no adapter {adapter}: it was started again")
                    continue
                raise RunStopped(f"The server at {server.url} {error}.") from error
            finally:
                self._fleet.release(server)
        return _aborted(item)

    def _bury_or_wait(self, server: VLLMServer, error: EndpointUnwell, tries: int) -> None:
        """Leave a server that died to its others, or pause before the next try; the last one gets all tries.

        Raises:
            RunStopped: It lives, and all tries have failed.
        """
        if self._given_up.is_set():
            return
        is_last_try = tries >= self._section.attempts
        if not server.is_well() and (is_last_try or not self._fleet.is_last(server)):
            self._fleet.bury(server, str(error))
        elif is_last_try:
            raise RunStopped(
                f"The server at {server.url} {error}, asked {tries} times. Mend it; the same command then goes on from "
                "the last checkpoint."
            ) from error
        else:
            self._given_up.wait(pause_seconds(tries))

    def _sampled(self, item: PendingCompletion, reply: Reply, adapter: str) -> Sampled:
        tokens, logprobs, finish = reply.tokens, reply.logprobs, reply.finish
        versions = self._fleet.versions(reply, adapter, self.oldest)
        stops = self._stops.with_texts(self._sampling.stop)
        end = stops.end(tokens.tolist(), 0)
        if end is not None:  # a text that ends a completion is looked for here
            tokens, logprobs, finish = tokens[:end], logprobs[:end], Finish.STOP
        elif finish is Finish.STOP:
            raise RunStopped(
                f"A server ended a completion at token {tokens[-1:].tolist()}, which is no end of this run's. Start "
                "servers by `holdfast serve`, which gives vLLM no other rules of its own."
            )
        spans = [(start, version) for start, version in versions if start < max(1, tokens.size)]
        first = spans[0][1] if spans else -1
        changes = tuple(spans) if len({version for _, version in spans}) > 1 else ()
        unscored = int(np.count_nonzero(np.isnan(logprobs)))
        return Sampled(item.request.request_id, item.seed_index, tokens, logprobs, finish, first, changes, unscored)


def _aborted(item: PendingCompletion) -> Sampled:
    return Sampled(
        item.request.request_id, item.seed_index, np.zeros(0, np.int64), np.zeros(0, np.float32), Finish.ABORT, -1
    )
