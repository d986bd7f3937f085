"""What a terminal shows of what a program wrote to it: rows of characters, wrapped at its width."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n])|([^\x1b\r\n])", re.DOTALL)


class Screen:
    """A terminal of so many columns and endless rows, on which a cursor moves as xterm's does.

    Moves left, right and to places are errors: nothing of ours makes them.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[str] = [""]
        self.drawn: list[str] = []
        """Rows as they were before they were erased, and the last one: what was drawn in place."""
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Take what was written."""
        for match in _TOKEN.finditer(text):
            arguments, command, control, character = match.groups()
            if character:
                self._put(character)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
            elif command == "A":
                self._row -= int(arguments or 1)
                assert self._row >= 0
            elif command == "K":
                assert arguments == "2"
                self.drawn.append(self.rows[self._row])
                self.rows[self._row] = ""
            else:
                assert command is None or command in "mhl", f"{arguments}{command}"

    def _put(self, character: str) -> None:
        if self._column == self.columns:  # the cursor waits behind the last column until there is something to write
            self._column = 0
            self._down()
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")
