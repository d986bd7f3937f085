"""The elements of one JSON array, read piece by piece: memory holds a chunk of the file and never the whole array.

The elements are meant to be objects; a bare number that a chunk cuts in two would count as two.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from holdfast.errors import DataError

CHUNK_CHARACTERS = 1 << 20

_BLANK = " \t\r\n"
_LONGEST_CUT_TOKEN = 16
"""A literal, number or escape cut by the end of a chunk fails within this many characters of the end."""


def array_elements(opened: IO[bytes], path: Path) -> Iterator[Any]:
    """Yield the elements of the JSON array in `opened`; `path` names it in errors.

    Raises:
        DataError: The text is not a JSON array; the element is named.
    """
    decoded = io.TextIOWrapper(opened, encoding="utf-8-sig")
    try:
        yield from _elements(_Text(decoded, path), path)
    finally:
        decoded.detach()


def _elements(text: _Text, path: Path) -> Iterator[Any]:
    text.expect("[", element=1)
    number = 0
    while text.peek() != "]":
        number += 1
        if number > 1:
            text.expect(",", element=number)
        yield text.value(number)
    text.expect("]", element=number)
    if text.peek():
        raise DataError(f"{path}: there is text after the end of the JSON array. A .json file holds one array of rows.")


class _Text:
    """A window of the file that grows when a value does not fit, and moves on behind each value."""

    def __init__(self, opened: io.TextIOWrapper, path: Path) -> None:
        self._opened = opened
        self._path = path
        self._decoder = json.JSONDecoder()
        self._window = ""
        self._position = 0
        self._ended = False

    def peek(self) -> str:
        """Return the next character that is not blank, or an empty string at the end."""
        while True:
            while self._position < len(self._window) and self._window[self._position] in _BLANK:
                self._position += 1
            if self._position < len(self._window) or self._ended:
                return self._window[self._position : self._position + 1]
            self._grow()

    def expect(self, character: str, element: int) -> None:
        """Step over `character`."""
        found = self.peek()
        if found != character:
            where = f"found {found!r}" if found else "the file ends"
            raise DataError(f"{self._path}, element {element}: not a JSON array, {where} where {character!r} belongs.")
        self._position += 1

    def value(self, element: int) -> Any:
        """Parse one value and step over it."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._position)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos >= len(self._window) - _LONGEST_CUT_TOKEN
                if self._ended or not cut_off:
                    raise DataError(f"{self._path}, element {element}: not valid JSON ({error.msg}).") from None
                self._grow()
            else:
                self._position = end
                return value

    def _grow(self) -> None:
        # Twice what is left: a value of n characters is then parsed from its start only log(n) times.
        rest = self._window[self._position :]
        try:
            more = self._opened.read(max(CHUNK_CHARACTERS, len(rest)))
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 ({error}).") from None
        self._window, self._position, self._ended = rest + more, 0, not more
