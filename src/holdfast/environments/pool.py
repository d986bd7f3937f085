"""The rank's end of the environments' processes.

A rank never runs an environment itself: what hangs, prints, forks or dies does so in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import patience
from holdfast.config.sections.environment import EnvironmentSection
from holdfast.environments.base import EnvironmentFault, Malformed, StepResult, Turn, kind_of
from holdfast.errors import ConfigError, DataError, RunStopped
from holdfast.files import python_module, read_end
from holdfast.rewards.processes import framing, kernel
from holdfast.text.escaping import escaped

_ENVIRONMENT = ("env", "OMP_NUM_THREADS=1", "PYTHONHASHSEED=0")
"""As of reward workers."""
_RECEIVED_BYTES = 1 << 18
_MOST_SHOWN_LINES, _MOST_SHOWN_BYTES = 3, 1000
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


class EnvironmentPool:
    """Environments in processes that can be killed, one for each episode.

    Args:
        config: What they are made of.
        base: The YAML's directory, where files are looked up.
        log_dir: Where they print.
        silent_seconds: After which the process that keeps them is given up, where something is asked of it.
    """

    def __init__(self, config: EnvironmentSection, base: Path, log_dir: Path, *, silent_seconds: float = 60.0) -> None:
        self._config, self._base, self._silent_seconds = config, base, silent_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._incoming = framing.MessageReader()
        self._unanswered: set[int] = set()
        """Episodes of which something is asked."""
        self._heard_at = 0.0
        """When something was last received, or first asked after everything had been answered."""
        self.log_path = log_dir / f"environments-{os.uname().nodename}-{os.getpid()}.log"
        """What environments print, tracebacks of those that raise included."""
        self._numbered = 0
        self.before_step: Callable[[], None] = lambda: None
        """Called before episodes begin."""
        self.log_is_named = False
        """Whether an error sends its reader to the log."""
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
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [*_ENVIRONMENT, *python_module("holdfast.environments.supervisor"), str(self.log_path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

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

    def begin(self, episode: int, row: Mapping[str, Any], seed: int) -> None:
        """Ask for a new environment that starts from a row."""
        self._ask("begin", episode, (dict(row), seed))

    def run(self, episode: int, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> None:
        """Ask for an agent to be run to its end; its answer comes when it returns."""
        self._ask("run", episode, (dict(row), seed, base_url, api_key))

    def take(self, episode: int, turn: Turn) -> None:
        """Ask an environment to take a turn."""
        self._ask("turn", episode, turn)

    def finish(self, episode: int) -> None:
        """Ask for the reward of an episode that ended otherwise than by its environment."""
        self._ask("finish", episode, None)

    def leave(self, episode: int) -> None:
        """Close an environment; there is no answer."""
        self._unanswered.discard(episode)
        self._send("close", episode, None)

    def answers(self, wait_seconds: float | None = 0.0) -> list[Answer]:
        """Return the answers that have come.

        Args:
            wait_seconds: Longest wait for the first; None waits for it.

        Raises:
            RunStopped: The process that keeps the environments died, or has been silent for too long although
                something is asked of it.
        """
        replies, answers = self._replies(), list[Answer]()
        end = None if wait_seconds is None else time.monotonic() + wait_seconds
        poll = select.poll()
        poll.register(replies, select.POLLIN)
        while True:
            left = self._silent_seconds if end is None else max(0.0, end - time.monotonic())
            if not poll.poll(1000 * min(left, self._silent_seconds)):
                if self._is_silent(replies, is_asked=bool(self._unanswered) or end is None):
                    self.close()
                    raise RunStopped(
                        f"The environments' processes have said nothing for {self._silent_seconds:g} s. Read "
                        f"{self._log()}; then start the run again."
                    )
                if end is not None:
                    return answers
                continue
            received = os.read(replies, _RECEIVED_BYTES)
            self._heard_at = time.monotonic()
            if not received:
                raise RunStopped(f"The environments' processes died. Read {self._log()}, then start the run again.")
            for message in self._incoming.feed(received):
                answers += _answers_of(json.loads(message))
            if answers:
                self._unanswered -= {answer.episode for answer in answers}
                return answers

    def _is_silent(self, replies: int, *, is_asked: bool) -> bool:
        """Return whether a sign of life is overdue; a process that was suspended with this one gets time for another.

        Args:
            replies: Where it would come; nothing is there now.
            is_asked: Without a request there is none.
        """
        if not is_asked or time.monotonic() - self._heard_at < self._silent_seconds:
            return False
        return not framing.has_come(replies, 2 * patience.current.sign_of_life_seconds)

    def move_log(self, folder: Path) -> None:
        """Copy the log into another folder, and let environments print there from now on.

        Raises:
            OSError: It cannot be copied.
        """
        target = folder / self.log_path.name
        shutil.copyfile(self.log_path, target)
        self.log_path = target
        self._send("log", 0, str(target))

    def close(self) -> None:
        """End every process; closed already, do nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(patience.current.pool_close_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its workers die with it: the kernel sees to that.
            kernel.kill_with_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience.current.pool_close_seconds)
            process.stdout.close()

    def _ask(self, name: str, episode: int, argument: Any) -> None:
        if not self._unanswered:
            self._heard_at = time.monotonic()
        self._unanswered.add(episode)
        self._send(name, episode, argument)

    def _send(self, name: str, episode: int, argument: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            # Packed twice: what is in a row is unpacked where the user's file is imported, and nowhere before.
            request = pickle.dumps((name, episode, pickle.dumps(argument)))
            framing.write(self._process.stdin.fileno(), request, self._silent_seconds)
        except (BrokenPipeError, TimeoutError):
            raise RunStopped(
                f"The environments' processes died, or hang. Read {self._log()}, then start the run again."
            ) from None

    def _replies(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _log(self) -> str:
        self.log_is_named = True
        return str(self.log_path) if self.log_path.exists() else f"logs/{self.log_path.name} in the run's directory"

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        setup = {
            "section": self._config.model_dump(),
            "base": str(self._base.resolve()),
            "timeout_seconds": self._config.timeout_seconds,
            "memory_mib": self._config.memory_mib,
        }
        deadline = time.monotonic() + _ENVIRONMENT_START_SECONDS
        reply: bytes | None = None
        try:
            framing.write(self._process.stdin.fileno(), pickle.dumps(setup))
            reply = framing.read_frame(self._replies(), deadline)
        except BrokenPipeError:
            pass
        except TimeoutError:
            raise ConfigError(
                f"environment: its file is still being imported after {_ENVIRONMENT_START_SECONDS:g} "
                "s. Move slow work into begin."
            ) from None
        match None if reply is None else json.loads(reply):
            case {"mistake": str(mistake)}:
                raise ConfigError(mistake)
            case {"ready": {"tools": tools, "replayable": replayable, "answering": answering}}:
                self.tools = {name: tuple(schemas) for name, schemas in tools.items()}
                self.replayable, self.answering = bool(replayable), frozenset(answering)
            case _:
                lines = read_end(self.log_path, _MOST_SHOWN_BYTES, 0).strip().splitlines()
                printed = f" It printed last: {escaped(' | '.join(lines[-_MOST_SHOWN_LINES:]))}." if lines else ""
                raise ConfigError(
                    f"environment: importing its file ended the process.{printed} Import the file in a Python of your "
                    "own."
                )


def _answers_of(message: Mapping[str, Any]) -> list[Answer]:
    if "episode" not in message:
        return []  # a sign of life
    if "fault" in message:
        text = escaped(str(message["message"]))
        return [Answer(message["episode"], message["seconds"], None, message["fault"], text)]
    result = message["result"]
    result["messages"] = tuple(result["messages"])
    return [Answer(message["episode"], message["seconds"], StepResult(**result))]
