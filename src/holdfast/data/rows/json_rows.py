"""JSON lines, JSON arrays and tables of text, as rows by number.

The file stays on disk; memory holds one offset per row. Every value is as the file writes it: a columnar reader would
fill the keys that one row lacks and another has with nulls, and so rewrite tool schemas and tool calls.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import xxhash

from holdfast.data.rows.text_files import table_rows
from holdfast.errors import DataError
from holdfast.files import RegularFile, parse_json

_PACKINGS = ("", ".gz")
_TABLES = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = tuple(f"{kind}{packing}" for packing in _PACKINGS for kind in (".jsonl", ".ndjson", ".json"))
TABLE_SUFFIXES = tuple(f"{kind}{packing}" for packing in _PACKINGS for kind in _TABLES)

_WRAPPERS = ("data", "rows", "train", "examples", "instances", "samples", "items", "records")
"""Names under which files of one object have their rows."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonRows:
    """Rows of JSON files, one after the other. Every line is parsed once at the start, so a bad one is found there."""

    def __init__(self, files: Sequence[Path], *, keep_bad: bool = False) -> None:
        """Index the files.

        Args:
            files: In their order.
            keep_bad: A line that is not JSON object is a row too, which raises DataError when it is read.

        Raises:
            DataError: A line is not a JSON object; file and line are named.
        """
        self._names = [str(path) for path in files]
        digest = xxhash.xxh3_128()
        self._files: list[IO[bytes]] = []
        self._starts: list[array[int]] = []
        self._rows_before = [0]
        for path in files:
            opened = _seekable_lines(path)
            # `__del__` may run when modules are gone already, at the interpreter's exit; a finalizer runs before.
            weakref.finalize(self, opened.close)
            starts = _index(path, opened, digest, keep_bad=keep_bad)
            self._files.append(opened)
            self._starts.append(starts)
            self._rows_before.append(self._rows_before[-1] + len(starts) - 1)
        self.content_hash: str = digest.hexdigest()
        """xxh3_128 of the lines, decompressed; those of an array as we write them."""

    def __len__(self) -> int:
        return self._rows_before[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        file_index = bisect_right(self._rows_before, index) - 1
        starts, offset = self._starts[file_index], index - self._rows_before[file_index]
        # pread leaves the file's position alone, so processes that share it after a fork do not disturb each other.
        line = os.pread(self._files[file_index].fileno(), starts[offset + 1] - starts[offset], starts[offset])
        return _parse(line, f"{self._names[file_index]}, row {offset}")


class BadRow(dict[str, Any]):
    """Stands for a row of a stream that cannot be read, where such rows are left out."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


def scan_json(files: Sequence[Path], start: int, *, keep_bad: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield rows front to back without an index; of the lines before row `start` none is parsed.

    With `keep_bad`, a line that is not JSON object comes as a `BadRow`.
    """
    to_skip = start
    for path in files:
        unit = _unit(path)
        for number, line in enumerate(_lines(path, unit), start=1):
            if not line.strip():
                continue
            if to_skip:
                to_skip -= 1
                continue
            try:
                yield _parse(line, f"{path}, {unit} {number}")
            except DataError as error:
                if not keep_bad:
                    raise
                yield BadRow(str(error))


def _index(path: Path, opened: IO[bytes], digest: Any, *, keep_bad: bool) -> array[int]:
    """Return where each row starts, and where the last one ends."""
    starts = array("q")
    unit = _unit(path)
    end = 0
    row: dict[str, Any] = {}
    for number, line in enumerate(opened, start=1):
        digest.update(line)
        if line.strip():
            try:
                row = _parse(line, f"{path}, {unit} {number}")
            except DataError:
                if not keep_bad:
                    if not starts and unit == "line":
                        _refuse_long_object(line, path)
                    raise
            starts.append(end)
        end += len(line)
    if len(starts) == 1 and (inner := next((name for name in _WRAPPERS if _is_rows(row.get(name))), None)):
        raise DataError(
            f"{path} is one JSON object, whose {inner!r} is a list of {len(row[inner])} rows. Write the list alone, "
            "[{...}, {...}], or its elements one on each line."
        )
    starts.append(end)
    return starts


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(element, dict) for element in value)


def _refuse_long_object(line: bytes, path: Path) -> None:
    """Refuse a file whose first line opens an object that it does not close.

    Raises:
        DataError: It does.
    """
    if line.strip() == b"{" or re.match(rb'\s*\{\s*"[^"]*"\s*:\s*[\[{]?\s*$', line):
        raise DataError(
            f"{path} is one JSON object over several lines, so its lines are no rows. Write the list of rows alone, "
            "[{...}, {...}], or one object on each line."
        )


def _parse(line: bytes, row_name: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):  # its own words count lines within this one
            reason = f"{error.msg}, column {min(error.pos, len(error.doc.rstrip())) + 1}"
        raise DataError(f"{row_name}: not valid JSON ({reason}). Each row is one JSON object on one line.") from None
    if not isinstance(row, dict):
        raise DataError(f"{row_name}: a row must be a JSON object with named columns, not a {type(row).__name__}.")
    return row


def _seekable_lines(path: Path) -> IO[bytes]:
    """Open the file itself where its lines are the rows, else an unnamed temporary copy written as JSON lines."""
    unit = _unit(path)
    if unit == "line" and _kind(path) == path.suffix:
        return io.BufferedReader(_opened(path))
    with ExitStack() as if_it_fails:
        copy = if_it_fails.enter_context(tempfile.TemporaryFile())
        copy.writelines(_lines(path, unit))
        copy.seek(0)
        if_it_fails.pop_all()
        return copy


def _lines(path: Path, unit: str) -> Iterator[bytes]:
    """Yield the rows of a file as JSON lines."""
    with _decompressed(path) as opened:
        if unit == "line":
            yield from opened
            return
        # Closed before the file is: whoever reads a part of the rows leaves generators behind.
        rows = table_rows(opened, path, _TABLES[_kind(path)]) if unit == "row" else array_elements(opened, path)
        with closing(rows) as elements:
            for element in elements:
                yield json.dumps(element, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file as if it were not packed.

    Raises:
        DataError: It cannot be opened, or its compression is damaged.
    """
    with _opened(path) as raw:
        try:
            if path.suffix != ".gz":
                yield io.BufferedReader(raw)
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast("IO[bytes]", unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}). Compress it again, or unpack it.") from None


def _opened(path: Path) -> RegularFile:
    try:
        return RegularFile(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _kind(path: Path) -> str:
    """Return the suffix that says what is in a file, whatever packs it."""
    return Path(path.stem).suffix if path.suffix in _PACKINGS else path.suffix


def _unit(path: Path) -> str:
    """Say what a row is in this file: a `line`, an `element` of one JSON array, or a table's `row`."""
    if _kind(path) in _TABLES:
        return "row"
    with _decompressed(path) as opened:
        head = opened.read(4096)
    return "element" if head.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[") else "line"


CHUNK_CHARACTERS = 1 << 20

_BLANK = " \t\r\n"
_LONGEST_CUT_TOKEN = 16
"""A literal, number or escape cut by the end of a chunk fails within this many characters of the end."""


def array_elements(opened: IO[bytes], path: Path) -> Generator[Any]:
    """Yield the elements of the JSON array in `opened`; `path` names it in errors.

    Raises:
        DataError: The text is not a JSON array; the element is named.
    """
    decoded = io.TextIOWrapper(opened, encoding="utf-8-sig")
    try:
        yield from _elements(_JsonWindow(decoded, path), path)
    finally:
        decoded.detach()


def _elements(text: _JsonWindow, path: Path) -> Iterator[Any]:
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


class _JsonWindow:
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
        next_character = self.peek()
        if next_character != character:
            actual = f"found {next_character!r}" if next_character else "the file ends"
            raise DataError(f"{self._path}, element {element}: not a JSON array, {actual} where {character!r} belongs.")
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
                    raise DataError(
                        f"{self._path}, element {element}: not valid JSON ({error.msg}). Correct it, or remove it."
                    ) from None
                self._grow()
            else:
                self._position = end
                return value

    def _grow(self) -> None:
        # Twice what is left: a value of n characters is then parsed from its start only log(n) times.
        unread = self._window[self._position :]
        try:
            more = self._opened.read(max(CHUNK_CHARACTERS, len(unread)))
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 ({error}).") from None
        self._window, self._position, self._ended = unread + more, 0, not more
