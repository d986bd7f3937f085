"""Requests to stop: the first is passed on to the ranks, which save; the second ends them now. SIGUSR1 only saves."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from types import FrameType, TracebackType

_REQUESTS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class StopSignals:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGUSR1 while it is entered; outside the main thread it collects nothing.

    The handlers only count: what follows happens in the loop that watches the ranks, never in the middle of it.
    """

    def __init__(self) -> None:
        self.save = False
        """Whether somebody asked for a checkpoint that the ranks do not know of yet."""
        self._received: Counter[signal.Signals] = Counter()
        self._passed_on: set[signal.Signals] = set()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (*_REQUESTS, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and `&` in scripts set that on purpose
                    self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal returned, typeshed has no name

    def _count(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  the signature is Python's
        if number == signal.SIGUSR1:
            self.save = True
            return
        self._received[signal.Signals(number)] += 1

    @property
    def any(self) -> bool:
        """Whether somebody asked to stop."""
        return bool(self._received)

    @property
    def now(self) -> bool:
        """Whether somebody asked twice."""
        return any(count > 1 for count in self._received.values())

    def to_pass_on(self) -> list[tuple[signal.Signals, str]]:
        """Return each new request once: the signal a rank gets for it, and what to tell the user."""
        new = [number for number in self._received if number not in self._passed_on]
        self._passed_on.update(new)
        return [
            (
                signal.SIGINT if number == signal.SIGINT else signal.SIGTERM,
                f"{_REQUESTS[number]}: the ranks finish their step, save and stop. "
                f"A second {_REQUESTS[number]} stops now; the newest checkpoint stays valid.",
            )
            for number in new
        ]
