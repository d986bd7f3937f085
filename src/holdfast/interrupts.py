"""Ctrl-C while a program starts: nothing of ours is there to be told, and imports must not be broken off.

Python raises KeyboardInterrupt at whatever line it arrives. In the middle of an import that leaves modules half made:
NumPy then recurses without end or reports that it was loaded twice, and where an import is optional the request is
lost.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

_RETRY_SECONDS = 0.05


def end_at_once(code: int, text: str = "") -> None:
    """Let Ctrl-C end this process without a word of Python's; for the imports at its start, when it has done nothing.

    Args:
        code: Exit code.
        text: What to write on standard error.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - the signature is Python's
        os.write(2, text.encode())
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # `&` in scripts sets that on purpose
        signal.signal(signal.SIGINT, end)


def raise_after_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as ever, but never in an import: it waits for the end of that, up to a second
    Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _Postponed().interrupt)


class _Postponed:
    def __init__(self) -> None:
        self._is_waiting = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is Python's
        if self._is_waiting:
            raise KeyboardInterrupt
        self._look(frame)

    def _look(self, frame: FrameType | None) -> None:
        self._is_waiting = _imports(frame)
        if not self._is_waiting:
            raise KeyboardInterrupt
        # A timer and no thread: the lock that starting one takes may be held by the code that was interrupted.
        signal.signal(signal.SIGALRM, lambda _, later: self._look(later))
        signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
