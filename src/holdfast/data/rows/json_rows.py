"""The rows of JSON lines, JSON arrays and tables of text, packed by gzip or not, front to back.

Every value is as the file writes it: a columnar reader would fill the keys that one row lacks and another has with
nulls, and so rewrite tool schemas and tool calls. Every value of a table is text: `007` stays `007`, and `NA` is not a
missing value.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from holdfast.errors import DataError
from holdfast.files import RegularFile, parse_json

PACKED_SUFFIX = ".gz"
_TABLES = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = tuple(f"{kind}{packing}" for packing in ("", PACKED_SUFFIX) for kind in (".jsonl", ".ndjson", ".json"))
TABLE_SUFFIXES = tuple(f"{kind}{packing}" for packing in ("", PACKED_SUFFIX) for kind in _TABLES)

Unit = Literal["line", "element", "row"]
"""What a row is in a file: a line, an element of one JSON array, or the row of a table."""

_LONGEST_FIELD = 2**28
"""Characters. A quotation mark that is never closed takes the rest of the file into one field."""


class BadRow(dict[str, Any]):
    """Stands for a row of a stream that cannot be read, where such rows are left out."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


Record = tuple[int, int, bytes, Any]
"""A row of a file, or one of its blank lines: where it starts and ends, in bytes of the unpacked file; the row as a
JSON line; its value where that is known before the line is parsed, else None."""


def scan_json(files: Sequence[Path], start: int, *, keep_bad: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield rows front to back without an index; of the lines before row `start` none is parsed.

    With `keep_bad`, a line that is not JSON object comes as a `BadRow`.
    """
    to_skip = start
    for path in files:
        unit = unit_of(path)
        with opened_rows(path) as opened, closing(records(opened, path, unit)) as found:
            for number, (_, _, line, value) in enumerate(found, start=1):
                if value is None and line.isspace():
                    continue
                if to_skip:
                    to_skip -= 1
                    continue
                try:
                    yield as_row(line, value, f"{path}, {unit} {number}")
                except DataError as error:
                    if not keep_bad:
                        raise
                    yield BadRow(str(error))


def as_row(line: bytes, value: Any, name: str) -> dict[str, Any]:
    """Return the row of a record; `name` says which in messages.

    Raises:
        DataError: It is not a JSON object.
    """
    try:
        row = parse_json(line) if value is None else value
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):  # its own words count lines within this one
            reason = f"{error.msg}, column {min(error.pos, len(error.doc.rstrip())) + 1}"
        raise DataError(f"{name}: not valid JSON ({reason}). Each row is one JSON object on one line.") from None
    if not isinstance(row, dict):
        raise DataError(f"{name}: a row must be a JSON object with named columns, not a {type(row).__name__}.")
    return row


@contextmanager
def opened_rows(path: Path, copy: IO[bytes] | None = None) -> Iterator[IO[bytes]]:
    """Open a file as if it were not packed, and write what is read of it into `copy` too.

    Raises:
        DataError: It cannot be opened, or its compression is damaged.
    """
    with regular(path) as raw:
        try:
            if path.suffix != PACKED_SUFFIX:
                yield io.BufferedReader(raw)
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                opened = cast("IO[bytes]", unpacked)
                yield opened if copy is None else io.BufferedReader(_Copied(opened, copy))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip file ({error}). Compress it again, or unpack it.") from None


class _Copied(io.RawIOBase):
    """A file whose bytes are written to another as they are read."""

    def __init__(self, opened: IO[bytes], copy: IO[bytes]) -> None:
        self._opened, self._copy = opened, copy

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._opened.read(len(buffer))
        self._copy.write(data)
        buffer[: len(data)] = data
        return len(data)


def regular(path: Path) -> RegularFile:
    """Open a regular file.

    Raises:
        DataError: It cannot be opened.
    """
    try:
        return RegularFile(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def kind_of(path: Path) -> str:
    """Return the suffix that says what is in a file, whatever packs it."""
    return Path(path.stem).suffix if path.suffix == PACKED_SUFFIX else path.suffix


def unit_of(path: Path) -> Unit:
    """Return what a row is in this file."""
    if kind_of(path) in _TABLES:
        return "row"
    with opened_rows(path) as opened:
        head = opened.read(4096).decode(errors="replace")
    return "element" if head.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith("[") else "line"


def records(opened: IO[bytes], path: Path, unit: Unit) -> Generator[Record]:
    """Yield the rows of a file with their places, and the blank lines between JSON lines.

    Raises:
        DataError: The file is no JSON array or no table; a line that is no JSON is the caller's to find.
    """
    if unit == "line":
        end = 0
        for line in opened:
            start, end = end, end + len(line)
            yield start, end, line, None
        return
    text = io.TextIOWrapper(opened, encoding="utf-8", newline="")
    rows = _table_rows(text, path) if unit == "row" else _elements(_JsonWindow(text, path), path)
    try:
        for start, end, value in rows:
            yield start, end, json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass") + b"\n", value
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}).") from None
    finally:
        text.detach()


def _table_rows(text: io.TextIOWrapper, path: Path) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield start, end and fields of a table's rows; its first line names the columns, and empty lines are left out."""
    end = 0

    def counted() -> Iterator[str]:
        nonlocal end
        for line in text:
            first = end == 0
            end += len(line.encode())
            yield line.removeprefix(_BYTE_ORDER_MARK) if first else line

    columns: list[str] = []
    lines = _fields(counted(), path)
    start = 0
    try:
        for fields in lines:
            if fields and not columns:
                columns = fields
                twice = next((name for name in fields if fields.count(name) > 1), None)
                if twice is not None:
                    raise DataError(f"{path}: the first line names the columns, and two of them are called {twice!r}.")
            elif fields:
                if len(fields) != len(columns):
                    separator = "tab" if kind_of(path) == ".tsv" else "comma"
                    raise DataError(
                        f"{path}, line {lines.line_num}: the row has {len(fields)} fields, and the first line names "
                        f"{len(columns)} columns. A field with a {separator}, a quotation mark or a line "
                        "break in it stands in quotation marks."
                    )
                yield start, end, dict(zip(columns, fields, strict=True))
            start = end
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: cannot be read as a table ({error}).") from None


def _fields(lines: Iterator[str], path: Path) -> Any:
    csv.field_size_limit(_LONGEST_FIELD)  # of the whole process; nobody else here reads csv
    return csv.reader(lines, delimiter=_TABLES[kind_of(path)], strict=True)


def fields_of(data: bytes, path: Path) -> list[str]:
    """Return the fields of the first row in these bytes of a table.

    Raises:
        DataError: They are no row.
    """
    try:
        text = io.StringIO(data.decode().removeprefix(_BYTE_ORDER_MARK), newline="")
        return next((fields for fields in _fields(text, path) if fields), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error}).") from None


CHUNK_CHARACTERS = 1 << 20

_BYTE_ORDER_MARK = "\ufeff"
_BLANK = " \t\r\n"
_LONGEST_CUT_TOKEN = 16
"""A literal, number or escape cut by the end of a chunk fails within this many characters of the end."""


def _elements(text: _JsonWindow, path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of the elements of a JSON array."""
    text.expect("[", element=1)
    number = 0
    while text.peek() != "]":
        number += 1
        if number > 1:
            text.expect(",", element=number)
            text.peek()
        start = text.offset
        value = text.value(number)
        yield start, text.offset, value
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
        self.offset = 0
        """Bytes of the file before the position."""

    def peek(self) -> str:
        """Return the next character that is not blank, or an empty string at the end."""
        while True:
            position = self._position
            while position < len(self._window) and (
                self._window[position] in _BLANK or (self.offset == 0 and self._window[position] == _BYTE_ORDER_MARK)
            ):
                position += 1
            self._step_to(position)
            if self._position < len(self._window) or self._ended:
                return self._window[self._position : self._position + 1]
            self._grow()

    def expect(self, character: str, element: int) -> None:
        """Step over `character`."""
        next_character = self.peek()
        if next_character != character:
            actual = f"found {next_character!r}" if next_character else "the file ends"
            raise DataError(f"{self._path}, element {element}: not a JSON array, {actual} where {character!r} belongs.")
        self._step_to(self._position + 1)

    def value(self, element: int) -> Any:
        """Parse one value and step over it."""
        while True:
            reason = "its brackets are nested too deeply"
            try:
                value, end = self._decoder.raw_decode(self._window, self._position)
            except (json.JSONDecodeError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError):
                    reason = error.msg
                    cut_off = reason.startswith("Unterminated") or error.pos >= len(self._window) - _LONGEST_CUT_TOKEN
                    if cut_off and not self._ended:
                        self._grow()
                        continue
                raise DataError(
                    f"{self._path}, element {element}: not valid JSON ({reason}). Correct it, or remove it."
                ) from None
            self._step_to(end)
            return value

    def _step_to(self, position: int) -> None:
        self.offset += len(self._window[self._position : position].encode())
        self._position = position

    def _grow(self) -> None:
        # Twice what is left: a value of n characters is then parsed from its start only log(n) times.
        unread = self._window[self._position :]
        more = self._opened.read(max(CHUNK_CHARACTERS, len(unread)))
        self._window, self._position, self._ended = unread + more, 0, not more
