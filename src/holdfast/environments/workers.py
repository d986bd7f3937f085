"""One process for each episode's environment: forks of a process that has imported the user's file.

A worker runs the user's code and answers one request after the other. It imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from selectors import BaseSelector
from typing import Any

from holdfast.environments.agents import AgentSource
from holdfast.environments.base import MOST_LEVELS, Malformed, StepResult, extent_of
from holdfast.environments.instances import EnvironmentSource, Instance
from holdfast.rewards.base import describe_error, outcome_of_exception
from holdfast.rewards.processes import framing, kernel
from holdfast.rewards.workers.fork_server import IGNORED
from holdfast.text.escaping import escaped_paragraph

MOST_ANSWER_BYTES = 1 << 24
"""Of one observation."""


@dataclass(eq=False)
class Worker:
    """The process of one episode's environment."""

    pid: int
    episode: int
    channel: socket.socket
    incoming: framing.MessageReader = field(default_factory=lambda: framing.MessageReader(MOST_ANSWER_BYTES))
    outgoing: bytes = b""
    deadline: float | None = None
    """When its answer is due; None where nothing is asked."""
    asked_at: float = 0.0
    is_closing: bool = False

    @property
    def is_overdue(self) -> bool:
        """Whether it was asked something and has been silent for too long."""
        return self.deadline is not None and time.monotonic() > self.deadline


def fork(
    episode: int,
    source: EnvironmentSource,
    memory_bytes: int,
    inherited: Iterable[BaseSelector | socket.socket],
    pipes: Iterable[int],
) -> Worker:
    """Start a worker in a session of its own, so that it dies with everything it starts.

    Args:
        episode: Whose it is.
        source: What its environment is made of.
        memory_bytes: Most address space.
        inherited: Open in the supervisor; the worker closes its copies.
        pipes: Likewise.
    """
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            for channel in inherited:
                channel.close()
            for pipe in pipes:
                os.close(pipe)
            os.setsid()
            kernel.die_with_parent()
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            if os.getppid() == supervisor:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
                _serve(theirs.detach(), source)
                status = 0
        except BaseException:  # noqa: BLE001 - the process edge: nothing may run on into the supervisor's code
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    ours.setblocking(False)
    return Worker(pid, episode, ours)


def _serve(channel: int, source: EnvironmentSource) -> None:
    """Answer until the channel is closed; a request is a pickled pair of its name and its argument."""
    this_pid = os.getpid()
    instance: Instance | None = None

    def begun(request: tuple[Any, int]) -> StepResult:
        nonlocal instance
        row, seed = request
        instance = source.instance(row, seed)
        return StepResult(instance.begin())

    def run(request: tuple[Any, int, str, str]) -> StepResult:
        assert isinstance(source, AgentSource)
        return source.run(*request)

    acts: dict[str, Callable[[Any], StepResult]] = {
        "begin": begun,
        "run": run,
        "turn": lambda turn: _present(instance).take(turn),
        "finish": lambda _: _present(instance).finish(),
    }
    while (payload := framing.read_frame(channel)) is not None:
        answer = _answer(payload, acts)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the user's code
            sys.stdout.flush()
        if os.getpid() != this_pid:
            os._exit(1)  # the user's code forked, and its child came back to us
        framing.write(channel, answer)
    if instance is not None:
        instance.close()


def _present(instance: Instance | None) -> Instance:
    assert instance is not None
    return instance


def _answer(payload: bytes, acts: dict[str, Callable[[Any], StepResult]]) -> bytes:
    try:
        name, packed = pickle.loads(payload)  # noqa: S301 - from our own parent
        return _encoded(acts[name](pickle.loads(packed)))  # noqa: S301 - likewise
    except Malformed as error:
        fault = {"fault": "malformed", "message": str(error)}
    except BaseException as error:  # noqa: BLE001 - the process edge: SystemExit is a fault of the environment, too
        with contextlib.suppress(Exception):
            print(escaped_paragraph("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        fault = {"fault": "raised", "message": outcome_of_exception(error).message}
    return json.dumps(fault).encode()


def _encoded(result: StepResult) -> bytes:
    """Return a result as JSON that any tokenizer takes: an unpaired surrogate is U+FFFD, as where one decodes.

    Raises:
        Malformed: A message has a value that is no JSON or is nested too deeply, or there is too much of it.
    """
    if extent_of({"result": vars(result)}).levels > MOST_LEVELS:
        raise Malformed(
            f"returned a message with a value that is too large or nested too deeply, in more than {MOST_LEVELS} levels"
        )
    values = asdict(result)
    try:
        text = json.dumps({"result": values}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise Malformed(f"returned a message with a value that is no JSON: {describe_error(error)}") from None
    # UTF-16 writes both halves of a pair side by side, so that they are one character again.
    text = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    encoded = text.encode()
    if len(encoded) > MOST_ANSWER_BYTES:
        raise Malformed(f"returned {len(encoded)} bytes, and an observation has {MOST_ANSWER_BYTES} at most")
    return encoded
