"""Writes the page of a run after its last save. If this takes too long, the page is left out."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from holdfast import patience
from holdfast.errors import UserError
from holdfast.features.report.page import write_page
from holdfast.training.directory import IDENTITY, count_starts

_PAGE_SECONDS = 60.0
"""Longest work at the page of a run that came to its end."""


class _PageTimeout(BaseException):
    """Raised when the time for the page is over, or a signal ends the command. No `except Exception` catches it."""


def write_at_end(directory: Path, starts_before: int, *, stopped: bool) -> None:
    """Write a run's page and print where it is; whatever goes wrong is one line, and the run's exit code stays.

    Args:
        directory: Of the run.
        starts_before: What `count_starts` said before the command trained.
        stopped: Whether somebody may be waiting for the command to end, as a scheduler does after SIGTERM.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not (directory / IDENTITY).exists() or count_starts(directory) == starts_before:
        return
    seconds = patience.current.page_after_stop_seconds if stopped else _PAGE_SECONDS
    try:
        with _giving_up_after(seconds):
            page = write_page([directory], None)
        print(f"what happened, on one page: {page}", flush=True)
    except _PageTimeout:
        print(f"The run's page was not written in {seconds:g} s: `holdfast report {directory}` does.", file=sys.stderr)
    except UserError as error:
        print(f"The run's page was not written. {error} Then `holdfast report {directory}` writes it.", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the run has ended, and a page must not change how
        print(f"The run's page could not be written: {type(error).__name__}: {error}", file=sys.stderr)


@contextmanager
def _giving_up_after(seconds: float) -> Iterator[None]:
    """Raise `_PageTimeout` in the block when its time is over, or when a signal asks the command to end."""

    def give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature is Python's
        raise _PageTimeout

    numbers = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    # A signal that is ignored, as nohup ignores SIGHUP, stays ignored.
    before = {number: signal.signal(number, give_up) for number in caught}
    began = time.monotonic()
    due, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if due:  # a timer of the process goes on, or rings now if it was due meanwhile
            signal.setitimer(signal.ITIMER_REAL, max(due - (time.monotonic() - began), 1e-3), interval)
