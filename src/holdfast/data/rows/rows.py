"""Sources of rows: files, saved data sets, the hub, generated tasks, live objects.

A source numbers its rows from 0 and has a fingerprint of them, by which a resume detects other rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import xxhash

from holdfast.config.sections.data import SourceConfig
from holdfast.data.rows.arrow_rows import (
    ARROW_SUFFIXES,
    PARQUET_SUFFIXES,
    ArrowRows,
    HubStream,
    is_saved_dataset,
    open_arrow,
    open_hub,
    open_parquet,
    open_saved,
    scan_arrow,
    scan_parquet,
)
from holdfast.data.rows.files import (
    default_name,
    files_of_split,
    find_files,
    split_off,
    tried,
)
from holdfast.data.rows.index import JsonRows
from holdfast.data.rows.json_rows import BadRow, scan_json
from holdfast.data.tasks.synthetic import SyntheticSource, TaskRows
from holdfast.errors import DataError
from holdfast.files import open_regular

Row = Mapping[str, Any]

_STREAM_HEAD_BYTES = 1 << 20
SPREAD_ROWS = 1024
"""Live rows that a fingerprint covers, spread evenly over all: every one of no more than so many."""


class Source(Protocol):
    """One set of rows, numbered from 0."""

    @property
    def name(self) -> str:
        """Name in metrics and errors."""

    @property
    def size(self) -> int | None:
        """Number of rows; None for a stream, which ends when it ends."""

    @property
    def fingerprint(self) -> str:
        """xxh3_128 of what the rows are, in hexadecimal."""

    def row(self, index: int) -> Row:
        """Return one row; a stream has none by number."""

    def scan(self, start: int) -> Iterator[Row]:
        """Yield the rows from row `start` on, front to back."""


@runtime_checkable
class NumberedRows(Protocol):
    """Rows by number: a list, a `datasets.Dataset`, a torch data set, our own readers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@runtime_checkable
class Skippable(Protocol):
    """A stream that can leave out its first rows faster than by reading them, such as `datasets.IterableDataset`."""

    def skip(self, n: int, /) -> Iterable[Row]:
        """Return the stream without its first `n` rows."""


@dataclass(frozen=True)
class Origin:
    """The name, path and column names of a source."""

    name: str
    path: str
    """The path that the user wrote, for errors."""
    columns: Mapping[str, str]
    """Our column names to the file's."""
    limit: int | None
    keep_bad: bool = False
    """Rows that cannot be read are told when they are asked for, and not when the source is opened."""

    def renamed(self, row: Row, index: int) -> Row:
        """Return the row under our names; the columns that are not renamed keep theirs.

        Raises:
            DataError: The row has no column of the file's name.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"Row {index} of {self.path} is a {type(row).__name__}; rows are mappings of columns.")
        if not self.columns:
            return row
        missing = [(ours, theirs) for ours, theirs in self.columns.items() if theirs not in row]
        if missing:
            ours, theirs = missing[0]
            raise DataError(
                f"Row {index} of {self.path} has no column {theirs!r}, which data.columns wants as {ours!r}. "
                f"Its columns are: {', '.join(row)}."
            )
        taken = set(self.columns.values())
        remaining = {column: value for column, value in row.items() if column not in taken}
        return remaining | {ours: row[theirs] for ours, theirs in self.columns.items()}

    def by_number(self, rows: NumberedRows, content_hash: str) -> MapSource:
        """Return the rows as a source with an index."""
        size = len(rows) if self.limit is None else min(self.limit, len(rows))
        mark = self._fingerprint(content_hash)
        return MapSource(self.name, rows, self.renamed, mark, size, keep_bad=self.keep_bad)

    def streamed(self, open_at: Callable[[int], Iterator[Row]], content_hash: str) -> StreamSource:
        """Return the rows as a source without one."""
        mark = self._fingerprint(content_hash)
        return StreamSource(self.name, open_at, self.renamed, mark, self.limit, keep_bad=self.keep_bad)

    def _fingerprint(self, content_hash: str) -> str:
        return _hash_of([content_hash, sorted(self.columns.items()), self.limit])


@dataclass(frozen=True)
class MapSource:
    """Rows that can be fetched in any order."""

    name: str
    rows: NumberedRows
    renamed: Callable[[Row, int], Row]
    """(a row, its number) -> the row under our names"""
    fingerprint: str
    size: int
    keep_bad: bool = False
    """See `Origin.keep_bad`."""

    def __post_init__(self) -> None:
        if self.size == 0 or not self.keep_bad:
            columns_of(self)

    def row(self, index: int) -> Row:
        """Return row `index`, 0 <= index < size."""
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return self.renamed(self.rows[index], index)

    def scan(self, start: int) -> Iterator[Row]:
        """Yield the rows from row `start` on."""
        return map(self.row, range(start, self.size))


@dataclass(frozen=True)
class StreamSource:
    """Rows that are read front to back."""

    name: str
    open_at: Callable[[int], Iterator[Row]]
    """Yields the rows from a number on."""
    renamed: Callable[[Row, int], Row]
    """(row, its number) -> the row under our column names"""
    fingerprint: str
    limit: int | None = None
    keep_bad: bool = False
    """See `Origin.keep_bad`; such a row is yielded as a `BadRow`."""
    size: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        columns_of(self)

    def row(self, index: int) -> Row:
        """A stream has no row by number."""
        raise TypeError(f"{self.name} is streamed: use scan({index})")

    def scan(self, start: int) -> Iterator[Row]:
        """Yield the rows from row `start` on."""
        row_count = None if self.limit is None else max(0, self.limit - start)
        for index, row in enumerate(islice(self.open_at(start), row_count), start=start):
            try:
                renamed = row if isinstance(row, BadRow) else self.renamed(row, index)
            except DataError as error:
                if not self.keep_bad:
                    raise
                renamed = BadRow(str(error))
            yield renamed


def columns_of(source: Source) -> tuple[str, ...]:
    """Return the columns of the first row, under our names.

    Raises:
        DataError: The source has no rows.
    """
    for row in source.scan(0):
        return tuple(row)
    raise DataError(f"{source.name} has no rows. Name a file with rows, or remove the source.")


def open_source(
    source: SourceConfig, base: Path, task_rows: TaskRows = "answers", *, keep_bad: bool = False, key: str = "data"
) -> Source:
    """Open the rows that a source's configuration names.

    Args:
        source: Exactly one of its `path` and `synthetic` is set.
        base: The YAML's directory; a relative path is looked up in the current directory first, then here.
        task_rows: What a generated task makes.
        keep_bad: As of `Origin`.
        key: Of the section.

    Raises:
        DataError: Nothing is there, it has no rows, or a row cannot be read.
    """
    try:
        return _opened(source, base, task_rows, keep_bad=keep_bad, key=f"{key}.path")
    except OSError as error:
        raise DataError(
            f"{key}.path={source.path} cannot be read: {error}. Check its permissions and the disk."
        ) from error


def _opened(source: SourceConfig, base: Path, task_rows: TaskRows, *, keep_bad: bool, key: str) -> Source:
    if source.path is None:
        assert source.synthetic is not None
        task = SyntheticSource(source.synthetic, task_rows)
        origin = Origin(source.name or task.name, f"The task {task.name}", source.columns, source.max_samples)
        return origin.by_number(task, task.fingerprint)
    path, split = split_off(source.path, base)
    origin = Origin(source.name or default_name(path), source.path, source.columns, source.max_samples, keep_bad)
    paths = find_files(path, base, key)
    rows: ArrowRows | JsonRows | HubStream
    if not paths:
        rows = open_hub(path, split or "train", source, tried(path, base))
    elif is_saved_dataset(paths[0]):
        rows = open_saved(paths[0], split)
    else:
        files = files_of_split(paths, split, path)
        if source.streaming:
            return origin.streamed(partial(_scan, files, keep_bad=keep_bad), _hash_of_heads(files))
        rows = open_files(files, keep_bad=keep_bad)
    if isinstance(rows, HubStream):
        return origin.streamed(rows.scan, rows.content_hash)
    if source.streaming:
        return origin.streamed(partial(_from_number, rows), rows.content_hash)
    return origin.by_number(rows, rows.content_hash)


def open_files(files: Sequence[Path], *, keep_bad: bool = False) -> ArrowRows | JsonRows:
    """Open files of one kind, so that their rows have numbers; `keep_bad` as of `Origin`.

    Raises:
        DataError: A row or a file cannot be read.
    """
    if files[0].name.endswith(PARQUET_SUFFIXES):
        return open_parquet(files)
    return open_arrow(files) if files[0].name.endswith(ARROW_SUFFIXES) else JsonRows(files, keep_bad=keep_bad)


def _scan(files: Sequence[Path], start: int, *, keep_bad: bool) -> Iterator[Row]:
    if files[0].name.endswith(PARQUET_SUFFIXES):
        return scan_parquet(files, start)
    return (
        scan_arrow(files, start)
        if files[0].name.endswith(ARROW_SUFFIXES)
        else scan_json(files, start, keep_bad=keep_bad)
    )


def from_rows(
    rows: NumberedRows | Iterable[Row], name: str, columns: Mapping[str, str] | None = None, limit: int | None = None
) -> Source:
    """Take live objects as a source: whatever has a length and numbers, else whatever can be iterated anew.

    The fingerprint covers the length and SPREAD_ROWS rows, with the first and the last; of a stream the first row.
    A `datasets.Dataset` is read too: its own fingerprint follows from the times of files and from how it was made.

    Args:
        rows: The objects.
        name: Of the source.
        columns: Our column names to theirs.
        limit: Take only so many of the first rows.

    Raises:
        DataError: There are no rows, a row is not a mapping, or the rows can be read only once.
    """
    origin = Origin(name, name, columns or {}, limit)
    if isinstance(rows, Mapping):
        raise DataError(f"{name}: a mapping is one row. Pass a list of rows, or datasets.Dataset.from_dict(...).")
    if isinstance(rows, NumberedRows):
        return origin.by_number(rows, _hash_of([len(rows), [*_spread(rows)]]))
    if iter(rows) is rows:
        raise DataError(
            f"{name}: a {type(rows).__name__} can be read once, but a run that resumes reads again. "
            "Pass a list, or an object whose __iter__ starts anew."
        )
    return origin.streamed(partial(_from_iterable, rows), _hash_of([next(iter(rows), None)]))


def _spread(rows: NumberedRows) -> Iterator[Row | None]:
    """Yield rows that are spread over all; None for one that cannot be read, which the step says that trains on it."""
    last, gaps = len(rows) - 1, min(len(rows), SPREAD_ROWS) - 1
    for number in range(gaps + 1):
        row = None
        with suppress(Exception):
            row = rows[last * number // max(gaps, 1)]
        yield row


def _from_number(rows: NumberedRows, start: int) -> Iterator[Row]:
    return (rows[index] for index in range(start, len(rows)))


def _from_iterable(rows: Iterable[Row], start: int) -> Iterator[Row]:
    if isinstance(rows, Skippable):
        return iter(rows.skip(start))
    return islice(iter(rows), start, None)


def _hash_of(values: Sequence[Any]) -> str:
    # An object without a JSON form stands for its type: its repr may hold an address, which changes with every run.
    text = json.dumps(values, sort_keys=True, default=lambda value: type(value).__qualname__)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def _hash_of_heads(files: Sequence[Path]) -> str:
    """Hash the sizes and beginnings of files too large to be read before a run."""
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular(path) as opened:
            digest.update(f"{path.stat().st_size}:".encode())
            digest.update(opened.read(_STREAM_HEAD_BYTES))
    return str(digest.hexdigest())
