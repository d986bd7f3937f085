"""Environments in processes that can be killed: one worker for each episode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.sections.environment import EnvironmentSection
from holdfast.environments.base import EnvironmentFault, Malformed, StepResult, Turn, kind_of
from holdfast.errors import DataError
from holdfast.processes.pool import Reply, WorkerPool
from holdfast.text.escaping import escaped

_ENVIRONMENT_START_SECONDS = 120.0
"""For importing an environment's file."""


@dataclass(frozen=True)
class Answer:
    """What became of a request to one episode's environment."""

    episode: int
    seconds: float
    """From the request to its answer."""
    result: StepResult | None
    """None where there is a fault."""
    fault: EnvironmentFault | None = None
    message: str = ""
    """Of a fault: a clause whose subject is the environment."""


class EnvironmentPool(WorkerPool):
    """Environments in processes that can be killed, one for each episode.

    Several threads may have episodes at the same time: each is told the answers of its own.

    Args:
        config: What they are made of.
        base: The YAML's directory, where files are looked up.
        log_dir: Where they print.
        silent_seconds: After which the process that keeps them is given up, where something is asked of it.
    """

    def __init__(self, config: EnvironmentSection, base: Path, log_dir: Path, *, silent_seconds: float = 60.0) -> None:
        super().__init__("environment", log_dir, silent_seconds)
        self._config, self._base = config, base
        self._numbered = 0
        self._living: set[int] = set()
        """Episodes that were admitted and not left."""
        self._admitting, self._receiving = threading.Lock(), threading.Lock()
        self._unread: dict[int, list[Answer]] = {}
        """Answers that nobody has taken, by episodes of which something was asked and that were not left."""
        self.before_step: Callable[[], None] = lambda: None
        """Called before episodes begin."""
        self.tools: Mapping[str, tuple[Mapping[str, Any], ...]] = {}
        """Schemas of what a policy may call, by the name of the environment; known once started."""
        self.answering: frozenset[str] = frozenset()
        """Names of environments that answer a turn without calls; it ends an episode of others. Known once started."""
        self.replayable = False
        """Whether equal rows, seeds and turns give equal observations; known once started."""

    def start(self) -> None:
        """Start the process that keeps them, and import the user's file in it; started already, do nothing.

        Raises:
            ConfigError: The environment or a tool cannot work.
        """
        if self._process is not None:
            return
        setup = {"section": self._config.model_dump(), "base": str(self._base.resolve())}
        ready = self._start(
            "holdfast.environments.work:make_work",
            setup,
            "environment",
            _ENVIRONMENT_START_SECONDS,
            "Move slow work into begin.",
        )
        self.tools = {name: tuple(schemas) for name, schemas in ready["tools"].items()}
        self.replayable, self.answering = bool(ready["replayable"]), frozenset(ready["answering"])

    def kind_of(self, row: Mapping[str, Any], row_name: str) -> str:
        """Return the name of a row's environment; "" where there is one, which has no name.

        Raises:
            DataError: The row names none that is there.
        """
        try:
            return kind_of(row, self.tools)
        except Malformed as error:
            raise DataError(f"{row_name} {error}. Correct the row, or what environment.path names.") from None

    def tools_of(self, row: Mapping[str, Any], row_name: str) -> tuple[Mapping[str, Any], ...]:
        """Return schemas of what a policy may call where an episode starts from a row.

        Raises:
            DataError: As `kind_of`.
        """
        return self.tools[self.kind_of(row, row_name)]

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers of episodes that no other ones have had."""
        first, self._numbered = self._numbered, self._numbered + count
        return first

    def admit(self, episode: int) -> bool:
        """Return whether an episode may begin, which then counts as an instance until it is left."""
        with self._admitting:
            is_admitted = len(self._living) < self._config.instances
            if is_admitted:
                self._living.add(episode)
            return is_admitted

    def begin(self, episode: int, row: Mapping[str, Any], seed: int) -> None:
        """Ask for a new environment that starts from a row."""
        self._request(episode, "begin", dict(row), seed)

    def run(self, episode: int, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> None:
        """Ask for an agent to be run to its end; its answer comes when it returns."""
        self._request(episode, "run", dict(row), seed, base_url, api_key)

    def take(self, episode: int, turn: Turn) -> None:
        """Ask an environment to take a turn."""
        self._request(episode, "turn", turn)

    def finish(self, episode: int) -> None:
        """Ask for the reward of an episode that ended otherwise than by its environment."""
        self._request(episode, "finish")

    def leave(self, episode: int) -> None:
        """Close an environment; there is no answer."""
        self._unread.pop(episode, None)
        with self._admitting:
            self._living.discard(episode)
        self._leave(episode)

    def answers(self, wait_seconds: float | None = 0.0, episodes: Collection[int] | None = None) -> list[Answer]:
        """Return the answers that have come.

        Args:
            wait_seconds: Longest wait for the first of anybody's; None waits for it.
            episodes: Whose; None: all.

        Raises:
            RunStopped: The process that keeps the environments died, or has been silent for too long although
                something is asked of it.
        """
        if self._receiving.acquire(timeout=-1 if wait_seconds is None else wait_seconds):
            try:
                if not (taken := self._taken(episodes)):
                    for reply in self._receive(wait_seconds):
                        # Of an episode that was left nobody wants to know.
                        self._unread.get(reply.key, []).append(self._answer_of(reply))
            finally:
                self._receiving.release()
            if taken:
                return taken
        return self._taken(episodes)

    def _taken(self, episodes: Collection[int] | None) -> list[Answer]:
        """Return what has come for episodes and was not taken."""
        numbers = list(self._unread) if episodes is None else episodes
        taken: list[Answer] = []
        for unread in [self._unread[number] for number in numbers if number in self._unread]:
            while unread:
                taken.append(unread.pop(0))
        return taken

    def _request(self, episode: int, name: str, *arguments: object) -> None:
        self._unread.setdefault(episode, [])
        self._ask(episode, (name, *arguments), self._config.timeout_seconds, begins=name in {"begin", "run"})

    def _answer_of(self, reply: Reply) -> Answer:
        if reply.answer is not None and "result" in reply.answer:
            result = dict(reply.answer["result"])
            result["messages"] = tuple(result["messages"])
            return Answer(reply.key, reply.seconds, StepResult(**result))
        if reply.answer is not None:
            return Answer(reply.key, reply.seconds, None, reply.answer["fault"], escaped(reply.answer["message"]))
        if reply.fault == "timeout":
            seconds = self._config.timeout_seconds
            return Answer(reply.key, reply.seconds, None, "timeout", f"gave no answer in {seconds:g} s")
        message = {
            "lied": "wrote into the channel of its worker, or closed it",
            "gone": "ended between two turns",
        }.get(reply.fault, f"ended its process ({reply.how})")
        return Answer(reply.key, reply.seconds, None, "died", message)
