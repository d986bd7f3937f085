"""Rows of text files by number, through one index for all processes of a host.

The index says where each row begins, and holds the unpacked bytes of compressed files; all other rows are read where
they lie. The process that comes first builds it in the temporary directory, others wait for it, and the last one that
leaves removes it. Its name follows from the bytes of the files, and a hash at its end from its own: an index that was
cut off, damaged or made of other bytes is built again. A process that cannot write there has an index of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import struct
import sys
import tempfile
import time
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import xxhash

from holdfast import patience
from holdfast.data.rows.json_rows import (
    PACKED_SUFFIX,
    as_row,
    fields_of,
    kind_of,
    opened_rows,
    records,
    regular,
    unit_of,
)
from holdfast.errors import DataError
from holdfast.files import RegularFile

_WRAPPERS = ("data", "rows", "train", "examples", "instances", "samples", "items", "records")
"""Names under which files of one object have their rows."""
_FORMAT = "1"
_PLACES = struct.Struct("=qq")
_END = struct.Struct("=q16s")
"""Bytes of the description before it, and the hash of all that stands before the hash."""
_HASHED_AT_ONCE = 1 << 20
_TRIES = 20
_SLOWEST_BUILD, _LOOK_SECONDS = 2e6, 0.05
"""Bytes a second; between two looks whether another process has built it."""


class JsonRows:
    """Rows of text files, one after the other. Every line is parsed once a host, so a bad one is found at the start."""

    def __init__(self, files: Sequence[Path], *, keep_bad: bool = False) -> None:
        """Open the index of the files, or build it.

        Args:
            files: In their order.
            keep_bad: A line that is not JSON object is a row too, which raises DataError when it is read.

        Raises:
            DataError: A line is not a JSON object, with file and line; or a file changed meanwhile.
        """
        self._files = list(files)
        self._names = [str(path) for path in files]
        stamps = [_stamp(path) for path in files]
        with ExitStack() as if_it_fails:
            # Opened first: a file that is replaced later keeps the bytes that the index speaks of.
            opened = [if_it_fails.enter_context(regular(path)) for path in files]
            key = _key(files, opened, keep_bad=keep_bad)
            build = partial(_build, key=key, files=files, keep_bad=keep_bad)
            size = sum(os.fstat(file.fileno()).st_size for file in opened)
            seconds = patience.current.rows_index_seconds + size / _SLOWEST_BUILD
            holds_rows = any(path.suffix == PACKED_SUFFIX for path in files)
            index, known = _index(key, build, seconds, holds_rows=holds_rows)
            # `__del__` may run when modules are gone already, at the interpreter's exit; a finalizer runs before.
            weakref.finalize(self, _leave, index, os.getpid())
            for path, before in zip(files, stamps, strict=True):
                if _stamp(path) != before:
                    raise _changed(path)
            if_it_fails.pop_all()
        for file in opened:
            weakref.finalize(self, file.close)
        self._stamps = stamps
        self._index = index
        self._places_at: int = known["places_at"]
        self._rows_before: list[int] = [0, *accumulate(known["rows"])]
        self._lines = [
            index if path.suffix == PACKED_SUFFIX else file for path, file in zip(files, opened, strict=True)
        ]
        self._units: list[str] = known["units"]
        self._columns = [
            self._columns_of(number, start) if unit == "row" else []
            for number, (unit, start) in enumerate(zip(self._units, known["starts"], strict=True))
        ]
        self.content_hash: str = known["content_hash"]
        """xxh3_128 of the lines, decompressed; those of an array or a table as JSON lines."""

    def __len__(self) -> int:
        return self._rows_before[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = bisect_right(self._rows_before, index) - 1
        name = f"{self._names[number]}, row {index - self._rows_before[number]}"
        try:
            return self._row(number, self._bytes(number, *self._places(index + number)), name)
        except DataError:
            if _stamp(self._files[number]) != self._stamps[number]:
                raise _changed(self._files[number]) from None
            raise

    def _row(self, number: int, data: bytes, name: str) -> dict[str, Any]:
        match self._units[number]:
            case "line":
                return as_row(data, None, name)
            case "element":
                return as_row(data.rstrip(b", \t\r\n"), None, name)
        fields, columns = fields_of(data, self._files[number]), self._columns[number]
        if len(fields) != len(columns):
            raise DataError(f"{name}: the row has {len(fields)} fields, and there are {len(columns)} columns.")
        return dict(zip(columns, fields, strict=True))

    def _places(self, entry: int) -> tuple[int, int]:
        place = self._places_at + entry * 8
        try:
            start, end = _PLACES.unpack(os.pread(self._index.fileno(), _PLACES.size, place))
        except struct.error:
            raise DataError(f"The index {self._index.name} was cut off while a run read it. Start it again.") from None
        return start, end

    def _bytes(self, number: int, start: int, end: int) -> bytes:
        file = self._lines[number]
        # Lines may be appended while a run reads; an array or a table that is written again has its rows elsewhere.
        if self._units[number] != "line" and file is not self._index:
            state = os.fstat(file.fileno())
            if (state.st_size, state.st_mtime_ns) != self._stamps[number][2:]:
                raise _changed(self._files[number])
        # pread leaves the file's position alone, so processes that share it after a fork do not disturb each other.
        return os.pread(file.fileno(), end - start, start)

    def _columns_of(self, number: int, start: int) -> list[str]:
        first, _ = self._places(self._rows_before[number] + number)
        return fields_of(self._bytes(number, start, first), self._files[number])


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with a file; nothing for one that is gone."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(path: Path) -> DataError:
    return DataError(
        f"{path} changed while its rows were read. Let nothing write to it, or name a copy of it, and start again."
    )


def _key(files: Sequence[Path], opened: Sequence[RegularFile], *, keep_bad: bool) -> str:
    digest = xxhash.xxh3_128(f"{_FORMAT} {keep_bad}".encode())
    for path, file in zip(files, opened, strict=True):
        digest.update(f"{kind_of(path)} {path.suffix} {os.fstat(file.fileno()).st_size}:".encode())
        hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _path(key: str) -> Path:
    return Path(tempfile.gettempdir()) / f"holdfast-rows-{os.getuid()}-{key}"


def _index(
    key: str, build: Callable[[IO[bytes]], None], seconds: float, *, holds_rows: bool
) -> tuple[IO[bytes], dict[str, Any]]:
    """Return the open index and what it says of itself: the host's, else one of this process alone."""
    with suppress(OSError):  # no place, no room, no locks, or somebody else's file
        for _ in range(_TRIES):
            shared = _shared(key, build, seconds)
            if shared is not None:
                _remove_abandoned()
                return shared
    with ExitStack() as if_it_fails:
        # Places alone may lie in memory, rows may not.
        own = tempfile.TemporaryFile if holds_rows else _in_memory
        index = if_it_fails.enter_context(own())
        build(index)
        known = _description(index, key)
        assert known is not None
        if_it_fails.pop_all()
    return index, known


def _in_memory() -> IO[bytes]:
    return os.fdopen(os.memfd_create("holdfast-rows"), "r+b")


def _shared(key: str, build: Callable[[IO[bytes]], None], seconds: float) -> tuple[IO[bytes], dict[str, Any]] | None:
    """Return the host's index, locked as long as it is open; None where another process removed it meanwhile.

    The kernel releases the lock of a process that is killed while it builds.

    Raises:
        OSError: There is no room or no lock, or another process has been building it for too long.
    """
    with ExitStack() as if_it_fails:
        index = if_it_fails.enter_context(_opened(_path(key), os.O_CREAT))
        state = os.fstat(index.fileno())
        if state.st_uid != os.getuid() or state.st_nlink > 1:
            raise PermissionError(f"{index.name} is not ours")
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except BlockingIOError:
            _wait_for_builder(index, seconds)
            is_alone = False
        known = _description(index, key)
        if known is None:
            if_it_fails.callback(_remove, index)
            if not is_alone or not _is_named(index):
                return None
            index.truncate(0)
            build(index)
            known = _description(index, key)
        fcntl.flock(index, fcntl.LOCK_SH)
        if known is not None:
            if_it_fails.pop_all()
    return None if known is None else (index, known)


def _wait_for_builder(index: IO[bytes], seconds: float) -> None:
    """Lock an index that another process builds, once it is built.

    Raises:
        TimeoutError: That process has been stopped, or hangs.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
    print(
        f"note: another process has been indexing these rows for {seconds:.0f} s ({index.name}), so this one indexes "
        "them for itself",
        file=sys.stderr,
    )
    raise TimeoutError


def _opened(path: Path, more_flags: int = 0) -> IO[bytes]:
    more_flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # in a folder of all users, where a link or a pipe may stand
    return open(path, "r+b", opener=lambda name, flags: os.open(name, flags | more_flags, 0o600))  # noqa: PTH123


def _is_named(index: IO[bytes]) -> bool:
    """Return whether others that open its path find this index; one of a process alone has none."""
    with suppress(OSError):
        return isinstance(index.name, str) and os.path.samestat(Path(index.name).stat(), os.fstat(index.fileno()))
    return False


def _remove(index: IO[bytes]) -> None:
    """Remove an index; processes that have it open keep it."""
    with suppress(OSError):
        if _is_named(index):
            Path(index.name).unlink()


def _leave(index: IO[bytes], owner: int) -> None:
    """Close an index, and remove it if no other process has it open.

    Args:
        index: The index.
        owner: The process that opened it: a fork shares its lock.
    """
    if os.getpid() == owner:
        with suppress(OSError):
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(index)
    index.close()


def _remove_abandoned() -> None:
    """Remove the indexes of processes that were killed."""
    path = _path("")
    for left in path.parent.glob(f"{path.name}*"):
        with suppress(OSError):
            _leave(_opened(left), os.getpid())


def _build(index: IO[bytes], key: str, files: Sequence[Path], *, keep_bad: bool) -> None:
    """Write the index: unpacked files, the starts of each file's rows with the end of its last, a description, a hash.

    Raises:
        DataError: A line is not a JSON object.
    """
    index.seek(0)
    content, places = xxhash.xxh3_128(), array("q")
    known: dict[str, Any] = {"key": key, "rows": [], "units": [], "starts": []}
    for path in files:
        start = index.tell()
        if path.suffix != PACKED_SUFFIX:
            start = 0
        known["starts"].append(start)
        known["units"].append(unit_of(path))
        before = len(places)
        _add_rows(path, index, content, places, start, keep_bad=keep_bad)
        known["rows"].append(len(places) - before - 1)
    known |= {"places_at": index.tell(), "content_hash": content.hexdigest()}
    index.write(places)
    description = json.dumps(known).encode()
    index.write(description + struct.pack("=q", len(description)))
    index.flush()
    index.write(_hash(index, index.tell()))
    index.flush()


def _add_rows(path: Path, index: IO[bytes], content: Any, places: array[int], shift: int, *, keep_bad: bool) -> None:
    """Append where each row of a file begins, and where the last one ends; a packed one is unpacked into the index."""
    unit = unit_of(path)
    most = path.stat().st_size if path.suffix != PACKED_SUFFIX else math.inf
    count, last = 0, 0
    row: dict[str, Any] = {}
    with opened_rows(path, index) as opened, closing(records(opened, path, unit)) as found:
        for number, (start, end, line, value) in enumerate(found, start=1):
            content.update(line)
            last = end
            if end > most:  # a file that grows faster than it is read has no end
                raise _changed(path)
            if value is None and line.isspace():
                continue
            try:
                row = as_row(line, value, f"{path}, {unit} {number}")
            except DataError:
                if not keep_bad:
                    if not count and unit == "line":
                        _refuse_long_object(line, path)
                    raise
            places.append(shift + start)
            count += 1
    places.append(shift + last)
    if count == 1 and (inner := next((name for name in _WRAPPERS if _is_rows(row.get(name))), None)):
        raise DataError(
            f"{path} is one JSON object, whose {inner!r} is a list of {len(row[inner])} rows. Write the list alone, "
            "[{...}, {...}], or its elements one on each line."
        )


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


def _description(index: IO[bytes], key: str) -> dict[str, Any] | None:
    """Return what an index says of itself; None where it is not whole."""
    size = os.fstat(index.fileno()).st_size
    end = os.pread(index.fileno(), _END.size, max(0, size - _END.size))
    if size < _END.size or _hash(index, size - 16) != end[8:]:
        return None
    length, _ = _END.unpack(end)
    known: dict[str, Any] = json.loads(os.pread(index.fileno(), length, size - _END.size - length))
    return known if known["key"] == key else None


def _hash(index: IO[bytes], size: int) -> bytes:
    digest = xxhash.xxh3_128()
    for start in range(0, size, _HASHED_AT_ONCE):
        digest.update(os.pread(index.fileno(), min(_HASHED_AT_ONCE, size - start), start))
    return digest.digest()
