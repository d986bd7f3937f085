"""Ctrl-C while a program starts, before Holdfast's own signal handlers are installed.

Python raises KeyboardInterrupt at whatever line it arrives. Raised in an import, it leaves modules half initialised:
NumPy then recurses without end or reports that it was loaded twice, and `try: import x` around an optional package
swallows the interrupt. So an interrupt either ends the process at once or waits until the import is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_RETRY_SECONDS = 0.05


def end_at_once(code: int, text: str = "") -> None:
    """Let Ctrl-C end this process without a traceback; for the imports at its start, when nothing needs cleaning up.

    Args:
        code: Exit code.
        text: What to write on standard error.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - the signature is Python's
        os.write(2, text.encode())
        # Not sys.exit: that raises SystemExit, which half-initialised modules may catch, and runs exit
        # handlers of theirs.
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # `&` in scripts sets that on purpose
        signal.signal(signal.SIGINT, end)


def raise_after_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as usual, but postpone it while an import runs.

    A second Ctrl-C is not postponed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _Postponed().install()


class _Postponed:
    def __init__(self) -> None:
        self._is_waiting = False
        self._before = sys.unraisablehook

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._unraisable

    def _interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is Python's
        if self._is_waiting:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._is_waiting = False
            raise KeyboardInterrupt
        self._look(frame)

    def _look(self, frame: FrameType | None) -> None:
        self._is_waiting = _imports(frame)
        if not self._is_waiting:
            raise KeyboardInterrupt
        self._look_later()

    def _look_later(self) -> None:
        # A timer and no thread: the lock that starting one takes may be held by the code that was interrupted.
        self._is_waiting = True
        signal.signal(signal.SIGALRM, self._due)
        signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)

    def _due(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is Python's
        if not self._is_waiting:  # it rang while the second Ctrl-C, which ended the wait, was handled
            return
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            self._look(frame)
        else:  # somebody who saves first has taken over meanwhile
            signal.raise_signal(signal.SIGINT)

    def _unraisable(self, unraisable: UnraisableHookArgs) -> None:
        """Retry an interrupt that Python could only print and drop.

        It does so where an exception cannot propagate: in callbacks of fork and weak references, and in `__del__`.
        """
        if unraisable.exc_type is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
            self._look_later()
        else:
            self._before(unraisable)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        # The frames of the import system are the only sign of an import in progress; Python has no public
        # one.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
