"""Who may stop, save or evaluate, and how all ranks come to the same answer."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from holdfast.config.metrics import EvaluationConfig
from holdfast.errors import HoldfastError
from holdfast.training.observe import ask
from holdfast.training.run import Run
from holdfast.types import StepEvent


@dataclass(frozen=True)
class Decision:
    """What happens after a step; the same on every rank."""

    stop: str | None = None
    """Why the run stops now, in words for the user."""
    save: bool = False
    evaluate: bool = False


class StopRequests:
    """Signals, as requests that the loop reads between steps.

    The first Ctrl-C, or SIGTERM, asks for an orderly stop after the current step; a second Ctrl-C interrupts at once.
    Outside the main thread no signal can be caught, and nothing is changed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        """Catch signals until the block ends."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface's
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class EvaluationTimes:
    """When evaluations are due, by steps, epochs or minutes."""

    def __init__(self, config: EvaluationConfig, epoch: float) -> None:
        self._config = config
        self._last_time = time.monotonic()
        self._last_epoch = epoch

    def due(self, step: int, epoch: float) -> bool:
        """Return whether an evaluation follows this step; asking marks it as done."""
        config, now = self._config, time.monotonic()
        by_steps = config.every_steps is not None and step % config.every_steps == 0
        by_time = config.every_minutes is not None and now - self._last_time >= 60 * config.every_minutes
        by_epochs = config.every_epochs is not None and (
            int(epoch / config.every_epochs) > int(self._last_epoch / config.every_epochs)
        )
        self._last_epoch = epoch
        if by_steps or by_time or by_epochs:
            self._last_time = now
            return True
        return False


def decide(
    run: Run, event: StepEvent, requests: StopRequests, times: EvaluationTimes, elapsed_seconds: float
) -> Decision:
    """Let rank 0 decide what follows a step, and every rank follow.

    A signal that reached any rank counts.

    Raises:
        HoldfastError: An observer failed; on every rank.
    """
    mine: tuple[str | None, Decision | HoldfastError | None] = (requests.reason, None)
    if run.world.is_first:
        try:
            mine = (requests.reason, _first_rank_decides(run, event, times, elapsed_seconds))
        except HoldfastError as error:
            mine = (requests.reason, error)
    everyone = run.exchange.gather(mine)
    decision = everyone[0][1]
    if isinstance(decision, HoldfastError):
        raise decision
    assert decision is not None
    signalled = next((reason for reason, _ in everyone if reason is not None), None)
    if signalled is not None:
        return Decision(f"stopped by {signalled}", decision.save, decision.evaluate)
    return decision


def _first_rank_decides(run: Run, event: StepEvent, times: EvaluationTimes, elapsed_seconds: float) -> Decision:
    asked = ask(run.observers, event, run.state.observers)
    limit = run.config.max_minutes
    late = limit is not None and elapsed_seconds >= 60 * limit
    may_stop = event.step >= run.config.min_steps
    stop = None
    if may_stop and "stop" in asked:
        stop = "stopped by an observer"
    elif may_stop and late:
        stop = f"max_minutes={limit:g} have passed"
    return Decision(stop, "save" in asked, times.due(event.step, event.epoch) or "evaluate" in asked)
