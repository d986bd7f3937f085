"""Sample the episodes of the next steps on threads while the present step updates (`rollout.max_staleness`).

Each step ahead has a thread, which lets its environments answer and asks servers for the turns that follow. A turn may
be of newer weights than the one before it; every token keeps its version. A thread shares nothing with others but the
engine and the processes of environments, and makes no collective calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.rollout.engine import (
    AheadEpisodeEngine,
    Conversation,
    Interrupted,
    Request,
    Sampled,
)
from holdfast.rollout.episodes.loop import EpisodeLoop
from holdfast.training.policy.episode_groups import sampled_of
from holdfast.training.policy.episodes import LocalEpisodes, Writing
from holdfast.training.policy.run import PolicyEvaluation

_LOOK_SECONDS = 0.2
"""Between two looks whether anybody still wants the episodes."""
_END_SECONDS = 10.0
"""For a thread to notice that nobody does."""


@dataclass
class EpisodesAhead:
    """Begins episodes in the background; implements `AheadEngine` of `rollout/engine.py`.

    Args:
        episodes: Samples those of the present step.
        policy: Whose engine can sample in the background.
    """

    episodes: LocalEpisodes
    policy: PolicyEvaluation
    _unused: list[Writing] = field(default_factory=list)
    """Of threads that have ended."""

    def begin(
        self, requests: Sequence[Request], sampling: SamplingConfig, done: Sequence[Sampled] = ()
    ) -> EpisodeFlight:
        """Start to sample, but for episodes that are done already."""
        engine, there = self.policy.sampler.engine, {(sampled.request_id, sampled.place) for sampled in done}
        assert isinstance(engine, AheadEpisodeEngine)
        writing = self._unused.pop() if self._unused else self.episodes.writing.copied()
        missing = [
            request
            for each in requests
            for request in self.episodes.requests(each, writing)
            if (request.prompt_id, request.place) not in there
        ]
        given_up, stack = threading.Event(), ExitStack()
        stack.callback(self._unused.append, writing)
        loop = stack.enter_context(self.episodes.opened(missing, sampling, engine, writing, given_up.is_set))
        return EpisodeFlight(loop, engine.conversation(sampling), given_up, stack, done)


class EpisodeFlight:
    """Episodes that are sampled on a thread; implements `Flight` of `rollout/engine.py`.

    Args:
        loop: Hands out their turns.
        conversation: Samples them.
        given_up: Ends both when it is set.
        stack: What is open for them, and closed by the thread.
        done: Episodes that exist already.
    """

    def __init__(
        self,
        loop: EpisodeLoop,
        conversation: Conversation,
        given_up: threading.Event,
        stack: ExitStack,
        done: Sequence[Sampled],
    ) -> None:
        self._loop, self._given_up, self._done = loop, given_up, list(done)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(conversation, stack), name="holdfast-episodes", daemon=True
        )
        self._thread.start()

    def _run(self, conversation: Conversation, stack: ExitStack) -> None:
        with stack:
            try:
                conversation(self._loop, self._given_up.is_set)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: `collect` raises it
                self._error = error
                with suppress(RunStopped):  # the environments' processes have died
                    self._loop.abandon()

    def finished(self) -> list[Sampled]:
        """Return those that have ended, also while others are waited for; any thread may ask."""
        return _in_order([*self._done, *map(sampled_of, self._loop.ended())])

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all episodes, by prompt and place; those that have not ended when it is interrupted are aborted.

        Raises:
            RunStopped: No server is left, one answers what cannot be trained on, or the environments' processes died.
        """
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._thread.is_alive() and interrupted():
                self.end()
                break
        if self._error is not None and not interrupted():
            raise self._error
        return _in_order([*self._done, *map(sampled_of, self._loop.episodes)])

    def end(self) -> None:
        """Give up what has not ended, and see the thread end."""
        self._given_up.set()
        self._thread.join(_END_SECONDS)


def _in_order(episodes: Sequence[Sampled]) -> list[Sampled]:
    return sorted(episodes, key=lambda episode: (episode.request_id, episode.place))
