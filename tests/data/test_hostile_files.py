"""Rows and images that are no files, claim sizes that nobody has, or are damaged anywhere: one error, in a moment."""

from __future__ import annotations

import os
import random
import struct
import zlib
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from holdfast.data.content.image_files import ImageFiles
from holdfast.data.rows.arrow_rows import open_parquet, scan_parquet
from holdfast.data.rows.files import files_of_split
from holdfast.data.rows.index import JsonRows
from holdfast.data.rows.json_rows import scan_json
from holdfast.errors import DataError


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, *more: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


BOMBS = {
    "pixels": lambda: png(30_000, 30_000, bytes(1000)),
    "pixels beyond any memory": lambda: png(2**31 - 1, 2**31 - 1, bytes(1000)),
    "text": lambda: png(1, 1, bytes(4), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**28)))),
    "no pixels": lambda: png(0, 0, b""),
}
"""Made when they are asked for: a quarter of a gigabyte takes a second to pack."""


@pytest.mark.parametrize("name", BOMBS)
def test_an_image_that_unpacks_to_more_than_any_image_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"row 3 .* cannot be read as an image"):
        ImageFiles(None, Path()).open(BOMBS[name](), "row 3")


def test_images_that_are_damaged_anywhere_are_read_or_refused() -> None:
    whole = png(4, 4, b"".join(b"\0" + bytes(range(12)) for _ in range(4)))
    for seed in range(300):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 4])):
            data[chance.randrange(8, len(data))] = chance.choice([0, 0x7F, 0x80, 0xFF])
        try:
            assert ImageFiles(None, Path()).open(bytes(data), "row 3").mode == "RGB"
        except DataError as error:
            assert "row 3" in str(error)


def test_parquet_files_whose_footer_lies_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 50] * 300, "n": list(range(300))}), path, compression="zstd")
    whole = path.read_bytes()
    refused = 0
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3, 8])):
            data[chance.randrange(len(data) - 700, len(data) - 8)] = chance.choice([0, 0x7F, 0x80, 0xFF])
        path.write_bytes(data)
        try:
            for count, _ in enumerate(scan_parquet([path], 0)):
                assert count < 10_000
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 10


@pytest.mark.slow
def test_parquet_rows_that_unpack_to_more_than_memory_are_refused_by_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pyarrow.table({"text": pyarrow.array([bytes(2**22)] * 272, pyarrow.large_binary())})
    parquet.write_table(texts, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 2**20

    for read in (lambda: open_parquet([path]), lambda: next(scan_parquet([path], 0))):
        with pytest.raises(DataError, match=r"rows\.parquet: .* KiB of row group 0 unpack to 1\.1 GiB\. Rows do not"):
            read()


def test_parquet_rows_that_are_more_than_their_bytes_are_refused_by_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(20_000_000, pyarrow.string())}), path)

    with pytest.raises(DataError, match=r"says that its .* are 20,000,000 rows, too many to be true"):
        open_parquet([path])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_rows_from_a_pipe_are_refused_by_name_and_not_waited_for(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)

    with pytest.raises(DataError, match=f"{name} is a pipe, not a regular file"):
        files_of_split([pipe], None, str(pipe))
    if not name.endswith("parquet"):
        with pytest.raises(DataError, match=f"{name} cannot be read: it is a pipe"):
            JsonRows([pipe])
        with pytest.raises(DataError, match=f"{name} cannot be read: it is a pipe"):
            next(scan_json([pipe], 0))
