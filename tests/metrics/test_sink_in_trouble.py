"""A run's lines on a file system in trouble: asked again, with the path in what it says, and never half a line."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.files import RegularFile, append_text, naming, size_words
from holdfast.metrics.sink import JsonlSink, read_metrics
from tests.crash.disks import Remount, disk
from tests.crash.killed import STEPS, command

__all__ = ["disk"]


class MoodyFile(RegularFile):
    """Writes a part and then fails, as often as its sink says.

    Args:
        sink: Counts failures, and has their number.
    """

    def __init__(self, path: Path, sink: MoodySink) -> None:
        super().__init__(path, "ab")
        self._sink = sink

    def write(self, data: Any) -> int:
        if self._sink.failures and len(data) > 3:
            return super().write(data[:3])
        if self._sink.failures:
            self._sink.failures -= 1
            with naming(self.path):
                raise OSError(self._sink.number, os.strerror(self._sink.number))
        return super().write(data)


class MoodySink(JsonlSink):
    """A sink whose file fails for a while."""

    failures, number = 0, errno.EIO

    def opened(self) -> RegularFile:
        return MoodyFile(self._path, self)


@pytest.mark.parametrize("failures", [1, 3])
def test_a_write_that_fails_for_a_while_is_tried_again_and_leaves_whole_lines(tmp_path: Path, failures: int) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MoodySink(path)
    sink.write(1, {"loss": 1.5})
    sink.failures = failures

    sink.write(2, {"loss": 1.25})
    sink.write(3, {"loss": 1.0})

    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(("failures", "number"), [(9, errno.EIO), (1, errno.ENOSPC)])
def test_a_write_that_fails_for_good_names_the_file_and_leaves_no_part_of_a_line(
    tmp_path: Path, failures: int, number: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MoodySink(path)
    sink.write(1, {"loss": 1.5})
    sink.failures, sink.number = failures, number

    with pytest.raises(OSError, match=str(path)) as raised:
        sink.write(2, {"loss": 1.25})

    assert raised.value.errno == number
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl"])
def test_a_whole_run_whose_writes_fail_for_a_while_loses_no_line(tmp_path: Path, file: str) -> None:
    """Two writes in a row get EIO from the system itself, as strace has it answer."""
    fails = ["-e", "trace=write", "-e", "inject=write:error=EIO:when=2..3", "-P", str(tmp_path / "r" / file)]
    strace = ["strace", "-f", "--seccomp-bpf", "-o", str(tmp_path / "trace"), *fails]
    if shutil.which("strace") is None or subprocess.run([*strace, "true"], check=False).returncode != 0:
        pytest.skip("needs strace")
    program = [sys.executable, *command(tmp_path, "launch.ranks=1", "checkpoint.background=false")]

    done = subprocess.run([*strace, *program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trace").read_text().count("EIO") == 2
    events = [json.loads(line) for line in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    noted = [event.get("saved", event["event"]) for event in events if event["event"] != "memory"]
    assert noted == ["start", 2, 4, 6, 8, "done"]
    assert [line["step"] for line in read_metrics(tmp_path / "r/metrics.jsonl")] == list(range(1, STEPS + 1))


def test_an_event_on_a_real_full_disk_names_the_file_and_leaves_whole_lines(disk: tuple[Path, Remount]) -> None:
    place, remount = disk
    path, first, second = place / "events.jsonl", "1" * 5000 + "\n", "2" * 5000 + "\n"
    append_text(path, first)
    with (place / "filler").open("wb") as filler:
        filler.write(bytes(os.statvfs(place).f_bavail * os.statvfs(place).f_frsize))

    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        append_text(path, second)

    assert path.read_text() == first
    remount("size=8m")
    append_text(path, second)
    assert path.read_text() == first + second


def test_what_the_system_says_of_a_descriptor_has_the_path(tmp_path: Path) -> None:
    """Python gives no path to errors of reads, writes and flushes: only what opens a file names it."""
    path = tmp_path / "full"
    path.touch()
    os.truncate(path, 10)

    with pytest.raises(OSError, match=str(path)), RegularFile(path, "rb+") as file:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        os.dup2(descriptor, file.fileno())
        os.close(descriptor)
        file.write(b"x")  # not opened for writing


def test_a_buffered_read_that_fails_has_the_path(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 10)

    with LocalStorage(tmp_path).open("shard") as file:
        descriptor = os.open(tmp_path, os.O_RDONLY)  # a read of a directory fails in the system itself
        os.dup2(descriptor, file.fileno())
        os.close(descriptor)
        with pytest.raises(OSError, match=str(path)):
            file.read()

    assert isinstance(file, io.BufferedReader)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (12_800, "12.5 KiB"), (2**20, "1 MiB"), (2**32, "4 GiB")],
)
def test_sizes_are_told_in_the_unit_that_shows_them(count: int, words: str) -> None:
    assert size_words(count) == words
