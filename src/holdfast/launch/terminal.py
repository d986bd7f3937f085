"""Rank 0's output: onto the user's terminal as it is, into its log as plain lines.

A rank 0 whose launcher writes to a terminal writes to a pseudo-terminal, so that progress bars keep working; otherwise
it writes to pipes, so that `holdfast ... > file` holds what a plain program would have written.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import struct
import threading
import time
from pathlib import Path

try:  # absent where there is no POSIX terminal
    import fcntl
    import pty
    import termios
    import tty
except ImportError:  # pragma: no cover
    _TERMINALS = False
else:
    _TERMINALS = True

_TOKENS = re.compile(
    rb"\x1b\[(?P<count>[0-9;?]*)[ -/]*(?P<command>[@-~])"  # control sequence
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # title, hyperlink
    rb"|\x1b[@-Z\\^_=>()]"
    rb"|(?P<newline>\n)|(?P<return>\r)|(?P<text>[^\x1b\r\n]+)|\x1b"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*|\][^\x07\x1b]{0,256})?$")
_MOST_LINES_REDRAWN = 200
_LONGEST_LINE = 1 << 16


class PlainLines:
    """Turns what a program writes to a terminal into the lines that stay on it.

    Colours go; text that a carriage return or an erase replaces goes; lines that a live display redraws appear once.
    To know that, it holds back as many finished lines as the display has ever moved up.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._line = b""
        self._rest = b""
        self._returned = False
        self._moved_up = 0
        self._reach = 0

    def feed(self, chunk: bytes) -> bytes:
        """Take the next output, return the lines that can no longer change."""
        chunk = self._rest + chunk
        unfinished = _UNFINISHED.search(chunk)
        self._rest = unfinished.group() if unfinished else b""
        for token in _TOKENS.finditer(chunk, 0, len(chunk) - len(self._rest)):
            if token["newline"] or len(self._line) > _LONGEST_LINE:
                self._held.append(self._line + b"\n")
                self._line, self._returned, self._moved_up = b"", False, 0
            if token["return"]:
                self._returned = True
            elif token["text"]:
                self._line = token["text"] if self._returned else self._line + token["text"]
                self._returned, self._moved_up = False, 0
            elif token["command"]:
                self._control(token["command"], token["count"])
        final = max(0, len(self._held) - self._reach)
        lines, self._held = self._held[:final], self._held[final:]
        return b"".join(lines)

    def _control(self, command: bytes, count: bytes) -> None:
        if command == b"K" and (self._returned or count == b"2"):
            self._line = b""
        elif command == b"A":
            up = int(count) if count.isdigit() else 1
            self._moved_up = min(self._moved_up + up, _MOST_LINES_REDRAWN)
            self._reach = max(self._reach, self._moved_up)
            for _ in range(min(up, len(self._held))):
                self._line = self._held.pop().rstrip(b"\n")
            self._returned = True

    def close(self) -> bytes:
        """Return what was held back, an unfinished last line included."""
        rest = b"".join(self._held) + (self._line + b"\n" if self._line else b"")
        self._held, self._line = [], b""
        return rest


class Relay:
    """Copies rank 0's output to this process's stdout and stderr, and to its log.

    Use `stdout` and `stderr` for the child, call `start` when it runs and `finish` when it ended.
    """

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab", buffering=0)
        self._sources: dict[int, tuple[int, PlainLines]] = {}
        self._terminals: list[int] = []
        self._cursor_hidden = False
        self._give_up_at: float | None = None
        self._gone: set[int] = set()
        self.wrote = False
        """Whether rank 0 has written anything."""
        self.stdout = self._channel(1)
        both_terminals = len(self._terminals) == 1 and os.isatty(2)
        self.stderr = self.stdout if both_terminals else self._channel(2)
        self._thread = threading.Thread(target=self._copy, name="holdfast-rank-0-output", daemon=True)

    def _channel(self, target: int) -> int:
        if _TERMINALS and os.isatty(target):
            source, child_end = pty.openpty()
            # Raw: bytes arrive at the user's terminal unchanged, which adds its own carriage returns.
            tty.setraw(child_end)
            self._terminals.append(source)
        else:
            source, child_end = os.pipe()
        self._sources[source] = (target, PlainLines())
        self._match_size(source, target)
        return child_end

    def start(self) -> None:
        """Close the child's ends here and begin to copy."""
        for child_end in {self.stdout, self.stderr}:
            os.close(child_end)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy what is left; a process that still holds the other end is waited for `seconds` at most."""
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
        try:
            chunk = os.read(source, 1 << 16)
        except OSError:  # Linux answers EIO once the last writer of a pseudo-terminal has gone
            return False
        if not chunk:
            return False
        self.wrote = True
        target, lines = self._sources[source]
        self._match_size(source, target)
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

    def _match_size(self, source: int, target: int) -> None:
        if source not in self._terminals:
            return
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(target, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            if size != fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0)):
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)
