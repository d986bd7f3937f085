"""Stop requests by signal: on the first, ranks save and stop; on the second they end at once; SIGUSR1 only saves."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from types import FrameType, TracebackType

_REQUESTS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class StopSignals:
    """Counts SIGINT, SIGTERM, SIGHUP and SIGUSR1 within its block; outside of the main thread it receives none.

    The handlers only count. The loop that watches the ranks reacts, so that no handler runs in the middle of its work.
    """

    def __init__(self) -> None:
        self.save = False
        """Whether a checkpoint was requested by SIGUSR1 and the request has not been passed on yet."""
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
        """Whether a stop was requested."""
        return bool(self._received)

    @property
    def now(self) -> bool:
        """Whether a stop was requested twice by the same signal."""
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
