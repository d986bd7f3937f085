"""Requests to stop, save or evaluate (signals, clock, observers, intervals), and the decision that all ranks share."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

from holdfast.checkpoint.background import Status
from holdfast.errors import HoldfastError
from holdfast.metrics.sink import BY_OBSERVER
from holdfast.parallel.collectives import RankGroup
from holdfast.training.forms import LostForm, lost_forms
from holdfast.training.observe import ask
from holdfast.training.run import Training
from holdfast.types import StepEvent


@dataclass(frozen=True)
class Decision:
    """What follows a step: stop, save, evaluate; the same on every rank."""

    stop: str | None = None
    """The reason, for the user, if the run stops now; else None."""
    save: bool = False
    evaluate: bool = False
    due: bool = False
    """An evaluation belongs to this step, even if the run stops without it."""
    collect: bool = False
    """A save in the background has ended on every rank."""
    lost: tuple[list[LostForm], ...] = ()
    """Optional forms that ranks have given up in the step, in their order."""

    @property
    def needs_numbers(self) -> bool:
        """Whether the numbers of the step are needed before the next one."""
        return self.stop is not None or self.save or self.evaluate or self.due


class StopReason(NamedTuple):
    """Why the run has been asked to stop; rollouts and evaluations are interrupted for it."""

    text: str
    """The reason for the user."""
    by_signal: bool
    """Whether a signal asked for it. A signal takes precedence over other reasons; `max_minutes` does not."""


class StopRequests:
    """Stop and save requests by signals and by the clock, which the loop reads between steps.

    The first Ctrl-C, or SIGTERM, asks for an orderly stop after the current step; a second Ctrl-C interrupts at once.
    SIGUSR1 asks for a checkpoint. Outside the main thread no signal can be caught, and nothing is changed.

    Args:
        speaks_first: Whether to ignore SIGTERM after an error until the error is reported, since torchrun sends SIGTERM
            to all ranks of a machine as soon as one has ended.
    """

    def __init__(self, *, speaks_first: bool = False) -> None:
        self._speaks_first = speaks_first
        self.reason: str | None = None
        self.asked_at: float | None = None
        """When the stop was asked for, on the monotonic clock."""
        self.save = False
        self._over: Callable[[], str | None] = lambda: None
        self._previous: dict[int, Any] = {}
        self._drilling = False
        self._drill = threading.Event()

    def __enter__(self) -> StopRequests:
        """Install the signal handlers."""
        # Python allows signal handlers to be installed only from the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the earlier signal handlers."""
        leaves = self._speaks_first and kind is not None and issubclass(kind, Exception)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if leaves and number == signal.SIGTERM else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface's
        if number == signal.SIGUSR1:
            self.save = True
            return
        if self._drilling and number == signal.SIGTERM and not self._drill.is_set():
            self._drill.set()  # a second one is somebody's who means it
            return
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked_at = time.monotonic()
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    def start_clock(self, training: Training) -> None:
        """Let `max_minutes` count, from the start of the process, and let long work of the run look for requests.

        The clock asks for nothing before `min_steps` are done.
        """
        config, started = training.run.config, training.run.world.began

        def over() -> str | None:
            limit = config.max_minutes
            if limit is None or training.model.state.step < config.min_steps or time.monotonic() - started < 60 * limit:
                return None
            return f"max_minutes={limit:g} have passed"

        self._over = over
        training.run.interrupted = self.is_asked

    def is_asked(self) -> bool:
        """Return whether this rank knows of a request to stop."""
        return self.asked is not None

    @property
    def asked(self) -> StopReason | None:
        """The reason to stop that this rank knows of; a signal comes before the clock."""
        if self.reason is not None:
            return StopReason(f"stopped by {self.reason}", by_signal=True)
        over = self._over()
        return None if over is None else StopReason(over, by_signal=False)

    def pending(self, ranks: RankGroup) -> StopReason | None:
        """Return why the run shall stop: a signal that reached any rank, or else the clock of one."""
        stops = [request for request in ranks.gather(self.asked) if request is not None]
        return min(stops, key=lambda request: not request.by_signal, default=None)

    def drill(self, ranks: RankGroup) -> list[int]:
        """Send every rank a SIGTERM of its own, and return those that did not notice.

        A rank that has another handler by now is sent none: it might end the process.
        """
        if not self._previous:
            return []
        self._drill.clear()
        self._drilling = True
        ours = signal.getsignal(signal.SIGTERM) == self._note
        if ours:
            os.kill(os.getpid(), signal.SIGTERM)
        noticed = ranks.gather(ours and self._drill.wait(5.0))
        self._drilling = False
        return [rank for rank, heard in enumerate(noticed) if not heard]


class Intervals(Protocol):
    """A configuration section with intervals, such as that of checkpoints or of evaluations."""

    @property
    def every_steps(self) -> int | None:
        """Steps between two."""

    @property
    def every_minutes(self) -> float | None:
        """Minutes between two."""

    @property
    def every_epochs(self) -> float | None:
        """Epochs between two."""


class Timetable:
    """Tells when an action is due, by steps, epochs or minutes."""

    def __init__(self, config: Intervals, epoch: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._last_time = clock()
        self._last_epoch = epoch

    def due(self, step: int, epoch: float) -> bool:
        """Return whether it is due after this step; asking marks it as done."""
        config, timestamp = self._config, self._clock()
        by_steps = config.every_steps is not None and step % config.every_steps == 0
        by_time = config.every_minutes is not None and timestamp - self._last_time >= 60 * config.every_minutes
        by_epochs = config.every_epochs is not None and (
            _times_reached(epoch, config.every_epochs) > _times_reached(self._last_epoch, config.every_epochs)
        )
        self._last_epoch = epoch
        if by_steps or by_time or by_epochs:
            self._last_time = timestamp
            return True
        return False


def _times_reached(epoch: float, every: float) -> int:
    # 0.3 / 0.1 is a little less than 3; the error of such a quotient is a few parts in 10^16.
    return math.floor(epoch / every * (1 + 1e-12))


class Control:
    """Decides after every step, for one start of a run."""

    def __init__(self, training: Training, requests: StopRequests) -> None:
        self._training = training
        self._requests = requests
        self._evaluations = Timetable(training.run.config.evaluation, training.stream.epoch)
        self._saves = Timetable(training.run.config.checkpoint, training.stream.epoch)

    def decide(self, event: StepEvent, saving: Status) -> Decision:
        """Let rank 0 decide what follows a step, and every rank follow.

        A signal that reached any rank counts.

        Args:
            event: The step.
            saving: What this rank knows of the save in flight.

        Raises:
            HoldfastError: An observer failed; on every rank.
        """
        first: Decision | HoldfastError | None = None
        if self._training.run.world.is_first:
            try:
                first = self._first_rank_decides(event)
            except HoldfastError as error:
                first = error
        wants_save, self._requests.save = self._requests.save, False
        lost = lost_forms(self._training)
        rank_reports = self._training.run.ranks.gather((self._requests.reason, wants_save, saving, first, lost))
        decision = rank_reports[0][3]
        if isinstance(decision, HoldfastError):
            raise decision
        assert decision is not None
        signalled = next((reason for reason, *_ in rank_reports if reason is not None), None)
        return Decision(
            decision.stop if signalled is None else f"stopped by {signalled}",
            decision.save or any(saves for _, saves, *_ in rank_reports),
            decision.evaluate and signalled is None,
            decision.due,
            all(status in {"done", "failed"} for _, _, status, *_ in rank_reports),
            tuple(lost for *_, lost in rank_reports),
        )

    def _first_rank_decides(self, event: StepEvent) -> Decision:
        training = self._training
        answers = ask(training.observers, event, training.model.state.observers)
        late = self._requests.asked
        may_stop = event.step >= training.run.config.min_steps
        stop = None
        if may_stop and "stop" in answers:
            stop = BY_OBSERVER
        elif late is not None:
            stop = late.text
        save = self._saves.due(event.step, event.epoch) or "save" in answers
        evaluate = self._evaluations.due(event.step, event.epoch) or "evaluate" in answers
        return Decision(stop, save, evaluate and late is None, evaluate)
