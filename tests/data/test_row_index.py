"""One index a host of the rows in text files: shared, verified, rebuilt and removed; on real files and processes."""

from __future__ import annotations

import csv
import gzip
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import patience
from holdfast.data.rows.index import JsonRows
from holdfast.data.rows.json_rows import scan_json
from holdfast.errors import DataError
from tests.crash.disks import Remount, disk

__all__ = ["disk"]

ODD: list[dict[str, Any]] = [
    {"date": "2024-02-30", "time": "2024-01-01T00:00:00Z", "number": "007", "none": "NA"},
    {"b": None, "a": 1},
    {"a": "1"},
    {"a": 1.0, "z": [], "y": {}},
    {"a": [1, "two", None, {"x": None}], "c": True},
    {"a": 2**64 + 1, "b": -(2**80), "e": 1e308},
    {"z": 1, "a": 2, "m": {"q": 1, "b": 2}},
    {"text": "half an emoji \ud83d, a line\nbreak, \u2028"},
    {},
]
"""What columns of one type rewrite: dates, zeros, gaps beside nulls, mixed types, large integers, order of keys."""

TEXTS = [
    {"prompt": "007", "completion": "NA", "when": "2024-02-30"},
    {"prompt": 'a "quoted", two\r\nlines', "completion": "", "when": "\n"},
    {"prompt": "18446744073709551617", "completion": "1.50", "when": "True"},
    {"prompt": "ünï ✓", "completion": " null ", "when": "-0"},
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary directory of this test and of the processes that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def table_of(delimiter: str) -> bytes:
    lines = [delimiter.join(TEXTS[0])]
    for row in TEXTS:
        lines.append(delimiter.join('"' + value.replace('"', '""') + '"' for value in row.values()))
        lines.append("")
    return ("\ufeff" + "\r\n".join(lines)).encode()


FILES = {
    "rows.jsonl": lambda: (lines_of(ODD), ODD),
    "rows.jsonl.gz": lambda: (b"\n" + lines_of(ODD), ODD),
    "rows.json": lambda: (b"\xef\xbb\xbf " + json.dumps(ODD, indent=1).encode(), ODD),
    "rows.json.gz": lambda: (json.dumps(ODD).encode(), ODD),
    "rows.csv": lambda: (table_of(","), TEXTS),
    "rows.tsv.gz": lambda: (table_of("\t"), TEXTS),
}
"""By name: what is written, and the rows that it is."""


def same(row: Any, other: Any) -> bool:
    """Whether values, types and the order of keys are the same."""
    return repr(row) == repr(other)


@pytest.mark.parametrize("name", FILES)
def test_a_row_is_what_json_reads_of_it_whoever_built_the_index(name: str, tmp_path: Path) -> None:
    data, expected = FILES[name]()
    path = written(tmp_path / name, data)

    first = JsonRows([path])
    second = JsonRows([path])

    for rows in (first, second):
        assert len(rows) == len(expected)
        assert all(same(rows[index], expected[index]) for index in range(len(rows)))
    assert all(same(row, other) for row, other in zip(scan_json([path], 0), expected, strict=True))


KNOWN: list[dict[str, Any]] = [
    {"a": 1, "b": None},
    {"a": "007", "c": [1, {"x": 2**70}], "d": 1e5},
    {"text": "K\u00f6ln \u2713\n\u2028"},
]
CONTENT_HASHES = {
    "a.jsonl": (b"\n" + lines_of(KNOWN) + b"\r\n", "9ec1a5857ddf566612315255612b32dc"),
    "a.jsonl.gz": (b"\n" + lines_of(KNOWN) + b"\r\n", "9ec1a5857ddf566612315255612b32dc"),
    "a.json": (json.dumps(KNOWN, indent=1).encode(), "f3d90ba4f5b0011eae7529c8a2295037"),
    "a.csv": (b'x,y\r\n1,"a ""b"", c\r\nd"\r\n\r\n007,\r\n', "5f9eaca78c4f47b60936225c2d3d73e4"),
    "a.tsv.gz": ("x\ty\n1\tK\u00f6ln\n".encode(), "c7d1fb94f1cde63279087ee8c408abe2"),
}
"""By name: content, and the hash that the releases before the index gave it, by which a resume knows its rows."""


@pytest.mark.parametrize("name", CONTENT_HASHES)
def test_the_content_hash_of_a_file_is_what_it_always_was(name: str, tmp_path: Path) -> None:
    data, expected = CONTENT_HASHES[name]

    assert JsonRows([written(tmp_path / name, data)]).content_hash == expected


def test_the_content_hash_of_several_files_is_what_it_always_was(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, CONTENT_HASHES[name][0]) for name in ("a.jsonl", "a.jsonl.gz", "a.json")]

    assert JsonRows(paths).content_hash == "7efc0c0dd071e13f1e8d9127237ccb59"


def test_files_of_all_kinds_share_one_index_and_keep_their_order(tmp_path: Path, place: Path) -> None:
    pairs = [FILES[name]() for name in ("rows.jsonl", "rows.jsonl.gz", "rows.json")]
    paths = [
        written(tmp_path / name, data)
        for name, (data, _) in zip(("a.jsonl", "b.jsonl.gz", "c.json"), pairs, strict=True)
    ]

    rows = JsonRows(paths)

    assert all(same(rows[index], ODD[index % len(ODD)]) for index in range(len(rows)))
    assert len(rows) == 3 * len(ODD)
    assert len(list(place.iterdir())) == 1


def test_an_index_is_built_once_and_goes_with_its_last_reader(tmp_path: Path, place: Path) -> None:
    path = written(tmp_path / "rows.jsonl.gz", lines_of(ODD))

    first = JsonRows([path])
    (index,) = place.iterdir()
    made = index.stat()
    second = JsonRows([path])
    again = index.stat()
    del first
    left = list(place.iterdir())
    row = second[3]
    del second

    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert left == [index]
    assert same(row, ODD[3])
    assert list(place.iterdir()) == []
    assert made.st_mode & 0o077 == 0, "nobody else reads the rows"


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json.gz"])
def test_an_index_that_was_cut_off_or_damaged_anywhere_is_built_again(name: str, tmp_path: Path, place: Path) -> None:
    data, expected = FILES[name]()
    path = written(tmp_path / name, data)
    rows = JsonRows([path])
    (index,) = place.iterdir()
    whole = index.read_bytes()
    del rows
    damaged = [whole[:length] for length in range(0, len(whole), 29)]
    damaged += [flipped(whole, at) for at in range(0, len(whole), 29)]
    damaged += [whole + whole, bytes(len(whole)), whole[::-1]]

    for content in damaged:
        index.write_bytes(content)
        rows = JsonRows([path])
        assert index.read_bytes() == whole
        assert all(same(rows[number], row) for number, row in enumerate(expected))
        del rows


def test_an_index_of_other_bytes_is_not_taken_whatever_its_time_and_size(tmp_path: Path, place: Path) -> None:
    path = written(tmp_path / "rows.jsonl", b'{"a": 1}\n{"a": 22}\n')
    before = path.stat()
    old = JsonRows([path])
    (index,) = place.iterdir()

    path.write_bytes(b'{"a": 33}\n{"a": 4}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    new = JsonRows([path])
    (other,) = set(place.iterdir()) - {index}
    del new
    other.write_bytes(index.read_bytes())
    forged = JsonRows([path])

    assert [forged[number]["a"] for number in range(2)] == [33, 4]
    assert old.content_hash != forged.content_hash


def test_the_index_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path, place: Path) -> None:
    path = written(tmp_path / "rows.jsonl", lines_of(ODD))
    left = place / f"holdfast-rows-{os.getuid()}-{'0' * 32}"
    left.write_bytes(b"?")

    rows = JsonRows([path])

    assert not left.exists()
    assert same(rows[0], ODD[0])


READ = """
import json, sys
from pathlib import Path
from holdfast import patience
from holdfast.data.rows.index import JsonRows
from holdfast.errors import DataError
try:
    rows = JsonRows([Path(sys.argv[1])])
    print(len(rows), rows[len(rows) - 1], rows.content_hash, flush=True)
except DataError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def reader(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READ, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return written(tmp_path / "large.jsonl", b'{"a": "0123456789"}\n' * 400_000)


def test_processes_that_come_at_once_read_one_index_that_one_of_them_builds(large: Path, place: Path) -> None:
    readers = [reader(large) for _ in range(4)]
    said = {said_by(process) for process in readers}
    indexes = list(place.iterdir())
    for process in readers:
        process.communicate()

    (words,) = said
    assert words.startswith("400000 {'a': '0123456789'}")
    assert len(indexes) == 1
    assert list(place.iterdir()) == []


def has_opened_index(process: subprocess.Popen[str], place: Path) -> bool:
    """Return whether a process opens the index that another one builds before it says anything."""
    while not select.select([process.stdout], [], [], 0.05)[0]:
        links = (str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink())
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            if any(link.startswith(str(place)) for link in links):
                return True
    return False


def test_a_process_killed_while_it_builds_leaves_the_work_to_one_that_waits(large: Path, place: Path) -> None:
    builds = reader(large)
    while not list(place.iterdir()):
        time.sleep(0.001)
    builds.send_signal(signal.SIGSTOP)
    waits = reader(large)
    waited = has_opened_index(waits, place)
    builds.send_signal(signal.SIGKILL)
    builds.communicate()

    words = said_by(waits)
    waits.communicate()

    assert waited, "two processes built at once"
    assert words.startswith("400000 {'a': '0123456789'}")
    assert list(place.iterdir()) == []


def test_a_process_that_was_stopped_while_it_builds_is_not_waited_for(
    large: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "current", replace(patience.current, rows_index_seconds=0.1))
    builds = reader(large)
    while not list(place.iterdir()):
        time.sleep(0.001)
    builds.send_signal(signal.SIGSTOP)

    rows = JsonRows([large])
    said = capsys.readouterr().err
    builds.send_signal(signal.SIGKILL)
    builds.communicate()

    assert (len(rows), rows[399_999]) == (400_000, {"a": "0123456789"})
    assert str(place) in said


def test_an_array_that_is_written_again_is_named(tmp_path: Path, place: Path) -> None:
    path = written(tmp_path / "rows.json", b'[{"a": 1}, {"a": 2}]')
    rows = JsonRows([path])
    path.write_bytes(b'[{"b": 9}, {"c": 20}]')

    with pytest.raises(DataError, match=r"rows\.json changed"):
        rows[0]


def test_a_fork_that_ends_leaves_the_index_to_its_parent(tmp_path: Path, place: Path) -> None:
    rows = JsonRows([written(tmp_path / "rows.jsonl", b'{"a": 1}\n')])
    before = list(place.iterdir())
    pid = os.fork()
    if pid == 0:
        del rows
        os._exit(0)
    os.waitpid(pid, 0)

    assert list(place.iterdir()) == before != []
    assert rows[0] == {"a": 1}


def test_a_bad_line_leaves_no_index_and_is_the_same_error_for_all(large: Path, place: Path) -> None:
    with large.open("ab") as file:
        file.write(b"7\n")

    readers = [reader(large) for _ in range(2)]
    said = {said_by(process) for process in readers}
    for process in readers:
        process.communicate()

    assert said == {f"{large}, line 400001: a row must be a JSON object with named columns, not a int."}
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("rows.jsonl", "missing"),
        ("rows.jsonl", "a link"),
        ("rows.json.gz", "a link"),
        ("rows.jsonl", "a pipe"),
        ("rows.json.gz", "another's"),
    ],
)
def test_where_no_index_can_be_shared_each_process_has_its_own(
    name: str, trouble: str, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, expected = FILES[name]()
    path = written(tmp_path / name, data)
    rows = JsonRows([path])
    (index,) = place.iterdir()
    del rows
    match trouble:
        case "missing":
            monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
        case "a link":
            (tmp_path / "target").write_bytes(b"?")
            index.symlink_to(tmp_path / "target")
        case "a pipe":
            os.mkfifo(index)
        case _:
            index.write_bytes(b"?")
            os.link(index, place / "second name")

    rows = JsonRows([path])

    assert all(same(rows[number], row) for number, row in enumerate(expected))
    for kept in (tmp_path / "target", place / "second name"):
        assert not kept.exists() or kept.read_bytes() == b"?", "what others have there is theirs"


@pytest.mark.parametrize("options", ["size=4k", "ro"])
def test_a_full_or_read_only_place_leaves_plain_rows_and_names_packed_ones(
    options: str, tmp_path: Path, disk: tuple[Path, Remount], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remount = disk
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    remount(options)
    rows = [{"a": number} for number in range(5_000)]
    plain, packed = (written(tmp_path / name, lines_of(rows)) for name in ("rows.jsonl", "rows.jsonl.gz"))

    found = JsonRows([plain])

    assert [found[number] for number in range(len(found))] == rows
    with pytest.raises(OSError, match=r"No space left|Read-only"):
        JsonRows([packed])
    assert list(folder.iterdir()) == []


def test_a_file_that_is_written_to_while_its_rows_are_read_is_named(large: Path, place: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        with large.open("ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b'{"a": "0123456789"}\n')

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(DataError, match=r"large\.jsonl changed while its rows were read\. Let nothing write to it"):
            JsonRows([large])
    finally:
        stop.set()
        writer.join()
    assert list(place.iterdir()) == []


def test_a_file_that_is_cut_off_or_replaced_behind_the_index_is_named_or_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", lines_of(ODD))
    rows, replaced = JsonRows([path]), JsonRows([path])

    written(tmp_path / "new.jsonl", b'{"a": 1}\n').rename(path)
    stays = replaced[5]
    other = written(tmp_path / "other.jsonl", lines_of(ODD))
    cut = JsonRows([other])
    os.truncate(other, 70)

    assert same(stays, rows[5])
    with pytest.raises(DataError, match=r"other\.jsonl changed while its rows were read"):
        _ = cut[5]


def rows_with_one_that_differs(row: bytes) -> Iterator[bytes]:
    yield b'{"a": 1}\n' * 900_000
    yield row + b"\n"
    yield b'{"a": 2}\n' * 10


@pytest.mark.parametrize(("row", "is_read"), [(b'{"a": "text"}', True), (b"[1]", False)])
def test_another_type_at_line_900001_is_a_value_or_is_named(row: bytes, is_read: bool, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(rows_with_one_that_differs(row)))

    if is_read:
        rows = JsonRows([path])
        assert [rows[number]["a"] for number in (0, 900_000, 900_001)] == [1, "text", 2]
    else:
        with pytest.raises(DataError, match=r"rows\.jsonl, line 900001: a row must be a JSON object .* not a list"):
            JsonRows([path])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\x00"}', "Invalid control character"),
        (b"\x00" * 1_000, ""),
    ],
)
def test_hostile_rows_are_one_error_with_the_file(name: str, row: bytes, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, row + b"\n" if ".jsonl" in name else b"[" + row + b"]")

    with pytest.raises(DataError, match=rf"(?s)^{path}, \w+ 1: .*{reason}"):
        JsonRows([path])


def test_a_field_of_a_table_that_never_ends_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", b'a,b\n1,"' + b"x" * 1_000_000)

    with pytest.raises(DataError, match=r"rows\.csv, line 2: cannot be read as a table"):
        JsonRows([path])


def test_tables_as_the_csv_module_writes_them_are_read_by_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TEXTS[0])
        writer.writerows(row.values() for row in TEXTS)

    rows = JsonRows([path])

    assert [dict(rows[number]) for number in (3, 1, 0, 2)] == [TEXTS[3], TEXTS[1], TEXTS[0], TEXTS[2]]
