"""A stored chunk that would unpack, or be read, to more than its own bytes."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zipfile
from collections import Counter

import pytest
import torch

from holdfast.checkpoint.format.stored_chunks import _archive_is_modest, _unpacked_size, chunk_from


def stored(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def size_by_zipfile(data: bytes) -> int | None:
    """Return the bytes of all files as Python's own reader lists them, or None where it refuses the archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None


def size_by_torch(data: bytes, names: list[str]) -> int:
    """Return the bytes of all files of these names that torch's own reader unpacks."""
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    except (RuntimeError, UnicodeDecodeError):  # the second of its message, where that quotes a damaged name
        return 0
    total = 0
    for name in names:
        with contextlib.suppress(RuntimeError, UnicodeDecodeError):
            total += len(reader.get_record(name))
    return total


def test_a_view_that_repeats_its_bytes_is_no_chunk_of_any_size() -> None:
    assert chunk_from(stored(torch.zeros(1).expand(2**40)), "run/shard") is None


def test_a_chunk_as_a_save_writes_it_is_read() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)

    read = chunk_from(stored(tensor), "run/shard")

    assert read is not None
    assert torch.equal(read, tensor)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.arange(5.0), torch.zeros(70_000, dtype=torch.int8)])
def test_the_size_of_an_archive_of_torch_is_read_from_its_list(tensor: torch.Tensor) -> None:
    data = stored(tensor)

    assert _unpacked_size(data) == _unpacked_size(memoryview(data)) == size_by_zipfile(data)


@pytest.mark.parametrize("behind", [b"", b"\0", b"PK\5\6" + bytes(18)], ids=["end", "a byte", "a second end"])
def test_an_archive_that_ends_otherwise_is_left_to_zipfile(behind: bytes) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"some bytes")

    assert _unpacked_size(file.getvalue() + behind) is None


@pytest.mark.parametrize(
    ("place", "number"),
    [(-34, 8), (-50, 8), (-58, 1), (-66, 1), (-2, 1)],
    ids=["another record", "another list", "a longer list", "a file more", "a comment"],
)
def test_an_archive_whose_end_says_something_else_is_left_to_zipfile(place: int, number: int) -> None:
    """Torch would read the other record or list; there could be a bomb in it."""
    data = bytearray(stored(torch.arange(5.0)))
    assert _unpacked_size(bytes(data)) is not None

    data[place] ^= number

    assert _unpacked_size(bytes(data)) is None


def test_a_file_that_unpacks_to_more_than_the_archive_is_refused_by_the_list_alone() -> None:
    data = bytearray(stored(torch.arange(5.0)))
    entry = data.index(b"PK\1\2")
    assert _archive_is_modest(bytes(data))

    struct.pack_into("<L", data, entry + 24, len(data))

    assert _unpacked_size(bytes(data)) == size_by_zipfile(bytes(data))
    assert not _archive_is_modest(bytes(data))


def test_a_size_of_64_bits_is_left_to_zipfile() -> None:
    data = bytearray(stored(torch.arange(5.0)))

    struct.pack_into("<L", data, data.index(b"PK\1\2") + 24, 0xFFFFFFFF)

    assert _unpacked_size(bytes(data)) is None
    assert not _archive_is_modest(bytes(data))


def test_what_is_read_from_a_damaged_list_is_what_zipfile_and_torch_read() -> None:
    """By seeded damage, most of it in the list: no bomb gets past the quick look."""
    whole, seen = stored(torch.arange(64.0)), Counter[str]()
    where, names = random.Random(11), torch._C.PyTorchFileReader(io.BytesIO(whole)).get_all_records()
    for _ in range(20_000):
        data = damaged(whole, where)
        quick, slow = _unpacked_size(data), size_by_zipfile(data)
        seen["left to zipfile" if quick is None else "refused by zipfile" if slow is None else "both"] += 1

        assert quick is None or slow is None or quick == slow, data.hex()
        if quick is not None and quick <= len(data):
            assert size_by_torch(data, names) <= quick, data.hex()
    assert size_by_torch(whole, names) == _unpacked_size(whole)
    assert min(seen["left to zipfile"], seen["both"]) > 500, seen


def damaged(whole: bytes, where: random.Random) -> bytes:
    """Return an archive with a few bytes changed, set to their most, left out or put in."""
    data = bytearray(whole)
    for _ in range(where.choice([1, 1, 2, 4])):
        at = where.randrange(max(0, len(data) - 600) if where.random() < 0.9 else 0, len(data))
        kind = where.random()
        if kind < 0.6:
            data[at] = where.choice([0, 1, 0x7F, 0x80, 0xFF, where.randrange(256)])
        elif kind < 0.8:
            data[at : at + 4] = b"\xff" * len(data[at : at + 4])
        elif kind < 0.9:
            del data[at : at + where.randrange(1, 40)]
        else:
            data[at:at] = where.randbytes(where.randrange(1, 20))
    return bytes(data)
