"""JSON lines and arrays as rows by number, on real files."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.rows.index import JsonRows
from holdfast.data.rows.json_rows import CHUNK_CHARACTERS, scan_json
from holdfast.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "eins", "tool_calls": [{"name": "weather", "arguments": {"city": "Köln"}}]},
    {"prompt": "zwei", "tool_calls": [{"name": "clock", "arguments": {"zone": None}}]},
    {"prompt": "drei\nvier", "extra": 1.5},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_value_is_as_the_file_writes_it(tmp_path: Path) -> None:
    rows = JsonRows([write_lines(tmp_path / "rows.jsonl", ROWS)])

    assert [rows[index] for index in range(len(rows))] == ROWS


def test_files_follow_each_other(tmp_path: Path) -> None:
    first, second = write_lines(tmp_path / "a.jsonl", ROWS[:2]), write_lines(tmp_path / "b.jsonl", ROWS[2:])
    empty = write_lines(tmp_path / "none.jsonl", [])

    rows = JsonRows([first, empty, second])

    assert [rows[index] for index in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert list(scan_json([first, empty, second], 1)) == ROWS[1:]


def test_blank_lines_a_byte_order_mark_and_a_missing_last_newline_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\n\n{"a": 3}')

    rows = JsonRows([path])

    assert [rows[index]["a"] for index in range(len(rows))] == [1, 2, 3]
    assert [row["a"] for row in scan_json([path], 1)] == [2, 3]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.json.gz"])
def test_a_scan_gives_the_rows_from_any_start(name: str, start: int, tmp_path: Path) -> None:
    path = tmp_path / name
    if ".jsonl" in name:
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
    else:
        text = " " + json.dumps(ROWS, indent=2) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())

    rows = JsonRows([path])

    assert [rows[index] for index in range(len(rows))] == ROWS
    assert list(scan_json([path], start)) == ROWS[start:]


def test_the_content_hash_follows_the_rows_and_not_the_file(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "rows.jsonl", ROWS)
    packed = tmp_path / "elsewhere.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    other = write_lines(tmp_path / "other.jsonl", [*ROWS[:2], {**ROWS[2], "extra": 1.25}])

    assert JsonRows([plain]).content_hash == JsonRows([packed]).content_hash
    assert JsonRows([plain]).content_hash != JsonRows([other]).content_hash


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1,}', r"line 3: not valid JSON \(Expecting property name enclosed in double quotes, column 9\)"),
        ('{"a":', r"line 3: not valid JSON \(Expecting value, column 6\)"),
        ("[1, 2]", "line 3: a row must be a JSON object with named columns, not a list"),
        ("7", "line 3: a row must be a JSON object with named columns, not a int"),
    ],
)
def test_a_bad_line_is_named_at_the_start(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 0}}\n\n{line}\n{{"a": 1}}\n')

    with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
        JsonRows([path])
    with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
        list(scan_json([path], 1))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n{"a": "\xff\xfe"}\n')

    with pytest.raises(DataError, match=r"rows.jsonl, line 2: not valid JSON \('utf-8' codec"):
        JsonRows([path])


def test_an_array_longer_than_a_chunk_keeps_values_that_cross_its_edge(tmp_path: Path) -> None:
    long = "ä" * (CHUNK_CHARACTERS // 3)
    rows = [{"text": long, "number": -12.5e3, "flags": [True, None]} for _ in range(10)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")

    found = JsonRows([path])

    assert [found[index] for index in range(len(found))] == rows


def test_a_value_may_be_cut_anywhere_by_the_edge_of_a_chunk(tmp_path: Path) -> None:
    row = {"a": True, "b": -12.5e3, "c": [None, False], "d": "\u00e9\n", "e": {"f": 10}}
    path = tmp_path / "rows.json"

    for shift in range(len(json.dumps(row)) + 4):
        rows = [{"pad": "x" * (CHUNK_CHARACTERS - shift)}, row]
        path.write_text(json.dumps(rows))
        assert JsonRows([path])[1] == row


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": ', r"element 2: not valid JSON \(Expecting value\)"),
        ('[{"a": 1}, {"a": "x', r"element 2: not valid JSON \(Unterminated string"),
        ('[{"a": 1} {"a": 2}]', "element 2: not a JSON array, found '{' where ',' belongs"),
        ('[{"a": 1}', "element 2: not a JSON array, the file ends where ',' belongs"),
        ('[{"a": 1}, 3]', "element 2: a row must be a JSON object"),
        ('[{"a": 1}] [', "there is text after the end of the JSON array"),
    ],
)
def test_a_broken_array_is_named_with_its_element(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)

    with pytest.raises(DataError, match=f"rows.json.* {message}"):
        JsonRows([path])


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 500)[:-20])

    with pytest.raises(DataError, match="rows.jsonl.gz: damaged gzip file"):
        JsonRows([path])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_is_never_in_memory_as_a_whole(name: str, tmp_path: Path) -> None:
    rows = [{"text": f"{number}" * 100_000} for number in range(10, 210)]
    path = tmp_path / name
    if name.endswith("l"):
        write_lines(path, rows)
    else:
        path.write_text(json.dumps(rows))
    size = path.stat().st_size

    tracemalloc.start()
    found = JsonRows([path])
    last = found[199]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert last == rows[199]
    assert size > 40_000_000
    assert peak < size / 4
