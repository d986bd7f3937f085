"""The disk begins with a file while the rest of it is still being written."""

from __future__ import annotations

import array
import fcntl
import os
import time
from pathlib import Path

import pytest
import xxhash

from holdfast.checkpoint.place.storage import LocalStorage, begin_writeback

MIB = 2**20
FS_IOC_FIEMAP = 0xC020660B
WAITING = 0x4  # FIEMAP_EXTENT_DELALLOC: in memory only, with no place on the disk yet
ANOTHER_SECONDS = 5.0  # the kernel by itself waits for 30


def waiting_bytes(path: Path) -> int:
    """Return how much of a file the disk has not begun with (Documentation/filesystems/fiemap.rst)."""
    header, extent, most = 4, 7, 64  # in words of 8 bytes
    request = array.array("Q", [0] * (header + extent * most))
    request[1] = 2**62  # up to here
    request[3] = most
    with path.open("rb") as file:
        try:
            fcntl.ioctl(file, FS_IOC_FIEMAP, request)
        except OSError as error:
            pytest.skip(f"this file system does not tell where its extents are: {error}")
    found = request[2] >> 32
    extents = [request[header + extent * number : header + extent * (number + 1)] for number in range(found)]
    return sum(each[2] for each in extents if each[5] & WAITING)


def test_the_disk_begins_before_the_file_ends_and_every_byte_arrives(disk_path: Path) -> None:
    data = os.urandom(21 * MIB + 12_345)
    plain = disk_path / "plain"
    plain.write_bytes(data)
    if waiting_bytes(plain) < 20 * MIB:
        pytest.skip("this file system gives a file its place on the disk at once")
    with LocalStorage(disk_path).create("ours", sync=False) as writer:
        for start in range(0, len(data), 3 * MIB):
            writer.write(data[start : start + 3 * MIB])
        writer.flush()
        end = time.monotonic() + ANOTHER_SECONDS
        while waiting_bytes(disk_path / "ours") > 9 * MIB and time.monotonic() < end:
            time.sleep(0.05)
        assert waiting_bytes(disk_path / "ours") <= 9 * MIB  # it begins every 8 MiB
    assert (disk_path / "ours").read_bytes() == data
    assert writer.hexdigest() == xxhash.xxh3_128_hexdigest(data)


def test_where_it_cannot_be_asked_for_nothing_happens() -> None:
    inside, outside = os.pipe()
    begin_writeback(outside, 0, MIB)  # ESPIPE
    os.close(inside)
    os.close(outside)
    begin_writeback(outside, 0, MIB)  # EBADF
