"""csv, tsv and arrow files give the rows that the same content gives as JSON lines."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc

from holdfast.config.sections.data import SourceConfig
from holdfast.data.rows.rows import Source, open_source
from holdfast.errors import DataError

TEXTS = [
    {"prompt": "007", "completion": "NA"},
    {"prompt": 'a "quoted", two\nlines', "completion": ""},
    {"prompt": "tab\there", "completion": "1.50"},
    {"prompt": "ünï ✓", "completion": " null "},
    {"prompt": "=1+1", "completion": "True"},
]
NESTED: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]}
    for number in range(7)
]


def opened(path: Path | str, **options: Any) -> Source:
    return open_source(SourceConfig(path=str(path), **options), Path("/nowhere"))


def rows_of(source: Source) -> list[dict[str, Any]]:
    """Read all rows, and check that a scan from any row goes on with the same ones."""
    rows = list(source.scan(0)) if source.size is None else [source.row(index) for index in range(source.size)]
    for start in range(len(rows)):
        assert list(source.scan(start)) == rows[start:]
    return [dict(row) for row in rows]


def as_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def pack(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_a_table_has_the_rows_of_its_json_lines_as_text(
    kind: str, packing: str, streaming: bool, tmp_path: Path
) -> None:
    plain = tmp_path / f"rows{kind}"
    with plain.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"], delimiter="," if kind == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(TEXTS)
    path = pack(tmp_path / f"rows{kind}{packing}", plain.read_bytes())
    lines = as_json_lines(tmp_path / "lines.jsonl", TEXTS)

    table, reference = opened(path, streaming=streaming), opened(lines, streaming=streaming)

    assert rows_of(table) == rows_of(reference) == TEXTS
    assert table.name == "rows"
    if not streaming:
        assert table.fingerprint == reference.fingerprint


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files_of_both_forms_have_their_rows(
    form: str, compression: str | None, streaming: bool, tmp_path: Path
) -> None:
    table = pyarrow.Table.from_pylist(NESTED)
    for name, rows in (("a.arrow", table.slice(0, 3)), ("b.arrow", table.slice(3))):
        make = ipc.new_stream if form == "stream" else ipc.new_file
        options = ipc.IpcWriteOptions(compression=compression)
        with make(str(tmp_path / name), table.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=2)

    source = opened(tmp_path / "*.arrow", streaming=streaming)

    assert rows_of(source) == NESTED


def test_arrow_files_that_are_damaged_anywhere_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    table = pyarrow.table({"text": ["a" * 50] * 40, "n": list(range(40))})
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + b"\x7f" + whole[place + 1 :])
        try:
            rows_of(opened(path))
        except DataError as error:
            assert str(path) in str(error) or "rows" in str(error)
            refused += 1

    assert refused > 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,y\n1,2\n3\n", r"a\.csv, line 3: the row has 1 fields, and the first line names 2 columns"),
        ("a.csv", b'x,y\n1,"2\n', r"a\.csv, line 2: cannot be read as a table \(unexpected end of data\)"),
        ("a.tsv", b"x\tx\n1\t2\n", r"two of them are called 'x'"),
        ("a.csv", b"ok\n\xff\xfe\n", r"a\.csv: not UTF-8"),
        ("a.csv", b"", r"a has no rows"),
        ("a.arrow", b"ARROW1 and nothing more", r"a\.arrow: cannot be read as an Arrow file"),
        ("a.json", b'{"data": [{"text": "a"}, {"text": "b"}]}', r"one JSON object, whose 'data' is a list of 2 rows"),
        ("a.json", b'{\n "data": [\n {"text": "a"}]}', r"a\.json is one JSON object over several lines"),
        ("a.jsonl", b'{\n "text": "a"\n}\n', r"a\.jsonl is one JSON object over several lines"),
    ],
)
def test_what_cannot_be_rows_is_told_by_its_file_once(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError, match=message) as caught:
        opened(path)

    assert str(caught.value).count(name) <= 1


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.sqlite"])
def test_a_file_of_another_kind_is_named_once_with_what_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"?")

    with pytest.raises(DataError) as caught:
        opened(tmp_path / name)

    assert str(caught.value).count(name) == 1
    assert ".csv" in str(caught.value)


@pytest.mark.parametrize("named", ["rows.txt", "."])
def test_the_command_that_a_refused_text_file_names_makes_rows_of_its_lines(named: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b'one\n\n  two \r\n\tthree, "3"\n')

    with pytest.raises(DataError) as refused:
        opened(tmp_path / named)
    subprocess.run(str(refused.value).split("`")[1], shell=True, check=True)

    assert rows_of(opened(tmp_path / "rows.jsonl")) == [{"text": "one"}, {"text": "two"}, {"text": 'three, "3"'}]


def test_a_zstd_file_is_refused_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.zst").write_bytes(b"?")

    with pytest.raises(DataError, match=r"rows\.jsonl\.zst is no kind of file we read\. Unpack it with `zstd -d "):
        opened(tmp_path / "rows.jsonl.zst")


def test_tables_beside_rows_of_a_directory_are_notes(tmp_path: Path) -> None:
    as_json_lines(tmp_path / "rows.jsonl", NESTED)
    (tmp_path / "LICENSE.txt").write_text("Anyone may read this.\n")
    (tmp_path / "labels.csv").write_text("a,b\n1,2\n")

    assert rows_of(opened(tmp_path)) == NESTED


def test_a_directory_of_tables_alone_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        (tmp_path / f"{split}.csv").write_text(f"text\n{number}\n")

    assert rows_of(opened(f"{tmp_path}@test")) == [{"text": "2"}]
    with ipc.new_stream(str(tmp_path / "train.arrow"), pyarrow.schema([("text", pyarrow.string())])):
        pass
    with pytest.raises(DataError, match=r"holds both table and arrow files\. Name one kind by a glob"):
        opened(tmp_path)


READS_AS_NOBODY = """
import os
from pathlib import Path
from holdfast.data.rows.files import files_of_split
from holdfast.errors import DataError
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    print(files_of_split([Path("rows")], None, "rows"))
except DataError as error:
    print(error)
"""


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(tmp_path: Path) -> None:
    for name in ("rows/a.jsonl", "rows/closed/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    tmp_path.chmod(0o755)
    (tmp_path / "rows/closed").chmod(0)

    def read() -> str:
        command = [sys.executable, "-c", READS_AS_NOBODY]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert read().startswith("rows/closed cannot be read (Permission denied), and rows may be in it. Grant")
    (tmp_path / "rows/closed").rename(tmp_path / "rows/lost+found")
    assert read() == "[PosixPath('rows/a.jsonl')]\n", "root's own folder of an ext file system"
    (tmp_path / "rows/lost+found").rename(tmp_path / "rows/closed").chmod(0o755)
    assert [name in read() for name in ("rows/a.jsonl", "rows/closed/b.jsonl")] == [True, True]
