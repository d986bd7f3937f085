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

BOMB_BYTES = 2**20
UNREADABLE = (RuntimeError, UnicodeDecodeError)
"""What torch's reader raises; the second, where a message quotes a damaged name."""


def stored(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def with_a_second_list(whole: bytes) -> bytes:
    """Return an archive of torch in which the end in 32 bits points to another list, with a bomb.

    Readers that look at the end in 64 bits never see it.
    """
    size, offset = struct.unpack_from("<2Q", whole, len(whole) - 58)
    file = io.BytesIO()
    file.write(whole[:offset])
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(BOMB_BYTES))
        archive.writestr("archive/version", "3\n")
    bombed, end = file.getvalue()[:-22], file.getvalue()[-22:]
    tail = bytearray(whole[offset : len(whole) - 22])
    struct.pack_into("<Q", tail, size + 48, len(bombed))  # where the list is
    struct.pack_into("<Q", tail, size + 64, len(bombed) + size)  # where the end in 64 bits is
    return bombed + bytes(tail) + end


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
    except UNREADABLE:
        return 0
    total = 0
    for name in names:
        with contextlib.suppress(*UNREADABLE):
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
    assert _archive_is_modest(data)


@pytest.mark.parametrize("behind", [b"", b"\0", b"PK\5\6" + bytes(18)], ids=["end", "a byte", "a second end"])
def test_an_archive_that_torch_did_not_write_is_refused(behind: bytes) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"some bytes")

    assert not _archive_is_modest(file.getvalue() + behind)


@pytest.mark.parametrize("data", [b"", bytes(97), bytes(98), b"PK\3\4" + bytes(200)], ids=len)
def test_bytes_that_are_no_archive_are_refused(data: bytes) -> None:
    assert not _archive_is_modest(data)
    assert chunk_from(data, "run/shard") is None


@pytest.mark.parametrize(
    "places",
    [[0], [-98], [-58], [-50], [-66], [-42], [-34], [-34, -58], [-22], [-2]],
    ids=["no archive", "no end in 64 bits", "a longer list", "another list", "a file more", "no locator", "another end"]
    + ["another end and a longer list", "no end", "a comment"],
)
def test_an_archive_by_whose_ends_readers_can_come_to_another_list_is_refused(places: list[int]) -> None:
    data = bytearray(stored(torch.arange(5.0)))
    assert _archive_is_modest(bytes(data))

    for place in places:
        data[place] += 1

    assert not _archive_is_modest(bytes(data))


def test_a_second_list_counts_where_torch_reads_it() -> None:
    data = with_a_second_list(stored(torch.arange(5.0)))
    without_locator = data[:-42] + b"no" + data[-40:]
    assert size_by_torch(without_locator, ["data.pkl"]) == BOMB_BYTES > len(data)

    assert _archive_is_modest(data)
    assert not _archive_is_modest(without_locator)


def test_a_file_that_unpacks_to_more_than_the_archive_is_refused() -> None:
    data = bytearray(stored(torch.arange(5.0)))

    struct.pack_into("<L", data, data.index(b"PK\1\2") + 24, len(data))

    assert _unpacked_size(bytes(data)) == size_by_zipfile(bytes(data))
    assert not _archive_is_modest(bytes(data))


@pytest.mark.parametrize(
    ("extra", "size"),
    [
        (b"", 0xFFFFFFFF),
        (struct.pack("<2HQ", 1, 8, 2**40), 2**40),
        (struct.pack("<2HLH2HQ", 7, 6, 0, 0, 1, 8, 2**40), 2**40),
        (struct.pack("<2HQ2HQ", 1, 8, 2**40, 1, 8, 16), 2**40),  # zipfile takes the last of two, torch the first
        (struct.pack("<2HL2HL", 1, 4, 16, 7, 4, 0), 0xFFFFFFFF),
        (struct.pack("<2HQ", 1, 8, 2**40)[:-1], 0xFFFFFFFF),
    ],
    ids=["none", "one", "behind another", "two", "too short", "cut off"],
)
def test_a_size_of_64_bits_is_that_of_the_first_field_of_sizes(extra: bytes, size: int) -> None:
    whole = stored(torch.arange(5.0))
    list_size, offset = struct.unpack_from("<2Q", whole, len(whole) - 58)
    entry = bytearray(whole[offset : offset + 46])
    old_size, name = struct.unpack_from("<LH", entry, 24)
    struct.pack_into("<L2xH", entry, 24, 0xFFFFFFFF, len(extra))
    struct.pack_into("<H", entry, 28, name)
    tail = bytearray(whole[-98:])
    struct.pack_into("<Q", tail, 40, list_size + len(extra))
    struct.pack_into("<Q", tail, 64, len(whole) - 98 + len(extra))
    behind = offset + 46 + name
    data = whole[:offset] + entry + whole[offset + 46 : behind] + extra + whole[behind:-98] + tail

    assert _unpacked_size(data) == (_unpacked_size(whole) or 0) - old_size + size
    assert not _archive_is_modest(data)


@pytest.mark.parametrize("two_lists", [False, True], ids=["as torch writes it", "with a second list"])
def test_of_a_damaged_archive_torch_unpacks_no_more_than_its_size(*, two_lists: bool) -> None:
    """By seeded damage, most of it in the list and the ends; Python's reader, where it reads it, sees the same size."""
    whole, seen = stored(torch.arange(64.0)), Counter[str]()
    names = torch._C.PyTorchFileReader(io.BytesIO(whole)).get_all_records()
    assert size_by_torch(whole, names) == _unpacked_size(whole)
    whole, where = with_a_second_list(whole) if two_lists else whole, random.Random(11)
    for _ in range(10_000):
        data = damaged(whole, where)
        size, by_zipfile = _unpacked_size(data), size_by_zipfile(data)
        seen["refused" if size is None else "of a size"] += 1

        if size is not None and size <= len(data):
            assert size_by_torch(data, names) <= size, data.hex()
        assert None in (size, by_zipfile) or size == by_zipfile, data.hex()
    assert min(seen.values()) > 500, seen


def damaged(whole: bytes, where: random.Random) -> bytes:
    """Return an archive with a few bytes changed, set to their most, left out or put in."""
    data = bytearray(whole)
    for _ in range(where.choice([1, 1, 2, 4])):
        last = where.choice([100, 600, 600, len(data)])
        at = where.randrange(max(0, len(data) - last), len(data))
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
