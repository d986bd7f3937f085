"""The terminal of a launch: rank 0's output, the launcher's own paragraphs, and the user's requests to stop.

Rank 0's output is copied to the launcher's own output unchanged, and to the rank's log as plain lines. Rank 0 writes to
pipes. Its progress bar learns from environment variables whether the launcher writes to a terminal, and how wide that
is; so `holdfast ... > file` contains no control sequences.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from holdfast.text.escaping import escaped_paragraph

_LONGEST_LINE = 1 << 16
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_=>()])")
_REQUESTS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def tell(text: str) -> None:
    """Write a paragraph to the user's terminal."""
    with contextlib.suppress(OSError):  # the terminal has gone: the exit code still speaks
        sys.stderr.write(escaped_paragraph(text.rstrip("\n")) + "\n")
        sys.stderr.flush()


def as_shown(text: str) -> str:
    """Return a text as it would read on a terminal: no colours, and of each overwritten line the last state."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)


class PlainLines:
    """Turns a stream of terminal output into lines without colours; of a line that is redrawn, the last state stays."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Accept the next chunk of output; return the lines that are complete."""
        lines, newline, incomplete = (self._rest + chunk).rpartition(b"\n")
        incomplete = incomplete[max(0, incomplete.rfind(b"\r", 0, -1)) :]  # a \r at the end may be half of a line's end
        if len(incomplete) > _LONGEST_LINE:
            lines, newline, incomplete = lines + newline + incomplete, b"\n", b""
        self._rest = incomplete
        return as_shown((lines + newline).decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def close(self) -> bytes:
        """Return an unfinished last line."""
        return self.feed(b"\n") if self._rest else b""


class Relay:
    """Copies rank 0's output to this process's stdout and stderr, and to its log.

    Use `stdout`, `stderr` and `environ` for the child, call `start` when it runs and `finish` when it ended.
    """

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab", buffering=0)
        self._sources: dict[int, tuple[int, PlainLines]] = {}
        self._cursor_hidden = False
        self._give_up_at: float | None = None
        self._gone: set[int] = set()
        self.wrote = False
        """Whether rank 0 has written anything."""
        on_terminal = os.isatty(1)
        self.stdout = self._pipe(1)
        # On one terminal, lines keep their order.
        self.stderr = self.stdout if on_terminal and os.isatty(2) else self._pipe(2)
        width = {"COLUMNS": str(shutil.get_terminal_size().columns)} if on_terminal else {}
        self.environ: Mapping[str, str] = {"TTY_COMPATIBLE": str(int(on_terminal)), **width}
        """Variables from which the library rich learns about the terminal."""
        self._thread = threading.Thread(target=self._copy, name="holdfast-rank-0-output", daemon=True)

    def _pipe(self, target: int) -> int:
        source, child_end = os.pipe()
        self._sources[source] = (target, PlainLines())
        return child_end

    def start(self) -> None:
        """Close the child's ends here and begin to copy."""
        for child_end in {self.stdout, self.stderr}:
            os.close(child_end)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy the remaining output; wait at most `seconds` for processes that still hold the other end of a pipe."""
        self._give_up_at = time.monotonic() + seconds
        self._thread.join(seconds + 1)
        if self._cursor_hidden:  # a killed progress bar leaves the user without a cursor
            self._forward(1, b"\x1b[?25h\n")

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector, self._log:
            for source in self._sources:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map() and not (self._give_up_at and time.monotonic() > self._give_up_at):
                for key, _ in selector.select(timeout=0.2):
                    if not self._copy_chunk(key.fd):
                        selector.unregister(key.fd)
            for source, (_, lines) in self._sources.items():
                self._record(lines.close())
                os.close(source)

    def _copy_chunk(self, source: int) -> bool:
        chunk = os.read(source, 1 << 16)
        if not chunk:
            return False
        self.wrote = True
        target, lines = self._sources[source]
        self._forward(target, chunk)
        self._record(lines.feed(chunk))
        return True

    def _forward(self, target: int, chunk: bytes) -> None:
        if target in self._gone:
            return
        if b"\x1b[?25" in chunk:
            self._cursor_hidden = chunk.rfind(b"\x1b[?25l") > chunk.rfind(b"\x1b[?25h")
        try:
            while chunk:
                chunk = chunk[os.write(target, chunk) :]
        except OSError:  # `holdfast ... | head` closed the pipe, or the terminal is gone: the run goes on
            self._gone.add(target)

    def _record(self, lines: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run will say so itself, and the terminal shows it
            self._log.write(lines)


class StopSignals:
    """Counts SIGINT, SIGTERM, SIGHUP and SIGUSR1 within its block; outside of the main thread it receives none.

    On the first request ranks save and stop; on the second they end at once; SIGUSR1 only saves. The handlers count and
    nothing else: the loop that watches the ranks reacts, so that no handler runs in the middle of its work.
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

    def __exit__(self, *raised: object) -> None:
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
