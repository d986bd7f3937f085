"""Disks that are full, read-only, or lie: the save fails on all ranks alike, and earlier checkpoints stay."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.place.storage import LocalStorage, Storage
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, save_after, step
from tests.crash.cases import session_of
from tests.crash.disks import Remount, disk, inodes_used
from tests.crash.faulty import FullStorage, ShortStorage
from tests.crash.processes import run_doomed
from tests.training.cases import run, tree

__all__ = ["disk"]


def save_twice(world: World, first: Storage, second: Storage, background: bool = False) -> list[Any]:
    """Save steps 1, 2 and 3, the second into a faulty storage; return what became of each."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    session = session_of(first, world, background=background)
    outcomes: list[Any] = []
    for number, storage in ((1, first), (2, second), (3, first)):
        step(world, toy, optimizer, number)
        session.storage = storage
        try:
            session.save(take(toy, optimizer), number)
            session.collect()
        except CheckpointError as error:
            outcomes.append((type(error).__name__, str(error)))
        else:
            outcomes.append(contents(toy, optimizer))
    return outcomes


FAULTS = [
    pytest.param(shard_file(1), errno.ENOSPC, "rank 1 .*No space left", id="16-full disk in a shard of rank 1"),
    pytest.param(shard_file(0), errno.EIO, "rank 0 .*Input/output error", id="17-EIO in a shard of rank 0"),
    pytest.param("rank/rank-00001.json", errno.EDQUOT, "rank 1 .*Disk quota", id="16-quota in rank 1's own state"),
    pytest.param("manifest.json", errno.ENOSPC, "rank 0 .*No space left", id="16-full disk in the manifest"),
]


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize(("what", "number", "message"), FAULTS)
def test_a_full_disk_in_any_file_fails_the_save_on_all_ranks_and_leaves_nothing(
    pools: Any, tmp_path: Path, what: str, number: int, message: str, background: bool
) -> None:
    directory = tmp_path / "checkpoints"

    outcomes = pools(2).run(save_twice, LocalStorage(directory), FullStorage(directory, what, number), background)

    assert outcomes[0] == outcomes[1]
    first, second, third = outcomes[0]
    assert second[0] == "SaveFailed"
    assert re.search(message, second[1])
    assert "could not save in phase" in second[1]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000001", "step-00000003"]
    for number in (1, 3):
        assert checkpoint.verify(str(directory / f"step-0000000{number}")).step == number
    assert first != third


@pytest.mark.parametrize("ranks", [pytest.param(2, id="16-file cut short after it was closed")])
def test_a_file_that_is_shorter_than_what_was_written_fails_the_save(pools: Any, tmp_path: Path, ranks: int) -> None:
    outcomes = pools(ranks).run(save_twice, LocalStorage(tmp_path), ShortStorage(tmp_path))

    assert outcomes[0] == outcomes[1]
    assert "bytes after it was closed" in outcomes[0][1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def save_within(world: World, path: str, limit: int) -> None:
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save_after(world, path, 1)


@pytest.mark.parametrize("limit", [pytest.param(2000, id="16-the kernel cuts the shard of rank 1 (RLIMIT_FSIZE)")])
def test_a_real_limit_of_the_kernel_in_the_middle_of_a_shard_fails_the_save(tmp_path: Path, limit: int) -> None:
    ended = run_doomed(save_within, 2, str(tmp_path / "step-00000001"), limit)

    errors = [end.error for end in ended]
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0][0] == "SaveFailed"
    assert errors[0][1].startswith("rank 1 could not save in phase 'shards': File too large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(6, id="16-real full disk, no inode left"),
        pytest.param(1, id="16-real full disk, no inode for a second directory"),
    ],
)
def test_a_real_disk_without_room_for_another_file_fails_the_save_and_gets_its_room_back(
    pools: Any, disk: tuple[Path, Remount], left: int
) -> None:
    place, remount = disk
    ranks = 2
    pools(ranks).run(save_after, str(place / "step-00000001"), 1)
    used = inodes_used(place)
    remount(f"size=4m,nr_inodes={used + left}")

    errors = pools(ranks).errors(save_after, str(place / "step-00000002"), 2)

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert "No space left on device" in errors[0][1]
    assert inodes_used(place) == used
    assert checkpoint.verify(str(place / "step-00000001")).step == 1
    remount("size=4m,nr_inodes=1000")
    pools(ranks).run(save_after, str(place / "step-00000002"), 2)
    assert checkpoint.verify(str(place / "step-00000002")).step == 2


@pytest.mark.parametrize("ranks", [pytest.param(2, id="16-real full disk, no byte left")])
def test_a_real_disk_without_room_is_noticed_before_a_byte_is_written(
    pools: Any, disk: tuple[Path, Remount], ranks: int
) -> None:
    place, _ = disk
    with (place / "filler").open("wb") as file:
        file.write(bytes(os.statvfs(place).f_bavail * os.statvfs(place).f_frsize))

    errors = pools(ranks).errors(save_after, str(place / "step-00000001"), 1)

    assert errors[0] == errors[1]
    assert re.search(
        r"has [\d.,]+ \w+ free, a checkpoint needs [\d.,]+ \w+. Free some space or|No space left", errors[0][1]
    )
    assert [path.name for path in place.iterdir()] == ["filler"]


FILLS = """
import contextlib, os
from pathlib import Path

def fills_the_disk(event):
    if event.step == 3:
        place = Path({place!r})
        room = os.statvfs(place)
        with contextlib.suppress(OSError):  # a save in the background may be taking the same room
            (place / "filler").write_bytes(bytes((room.f_bavail - 4) * room.f_frsize))
"""


@pytest.mark.parametrize("background", [False, True], ids="25-disk that fills up in training, background {}".format)
def test_a_disk_that_fills_up_stops_a_run_on_all_ranks_with_its_last_checkpoint_whole(
    pools: Any, disk: tuple[Path, Remount], tmp_path: Path, background: bool
) -> None:
    place, _ = disk
    (tmp_path / "watch.py").write_text(FILLS.format(place=str(place)))
    saves = {"every_steps": 2, "keep": {"last": 2}, "export_at_end": False, "background": background}
    values = tree(str(place), steps=8, checkpoint=saves, observers=["watch.py:fills_the_disk"])

    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert "Free some space or choose another run.dir" in errors[0][1] or "No space left" in errors[0][1]
    left = [path for path in (place / "r" / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert [path.name for path in left] == ["step-00000002"] or background
    for path in left:
        checkpoint.verify(str(path))


@pytest.mark.parametrize("ranks", [pytest.param(2, id="18-read-only target")])
def test_a_read_only_disk_is_refused_before_the_first_step(pools: Any, disk: tuple[Path, Remount], ranks: int) -> None:
    place, remount = disk
    remount("ro")

    of_a_run = pools(ranks).errors(run, tree(str(place)))
    of_a_loop = pools(ranks).errors(rehearse_there, str(place))

    assert of_a_run[0] == of_a_run[1]
    assert of_a_run[0][0] == "ConfigError"
    assert f"{place} cannot be written by this user. Choose another run.dir." in of_a_run[0][1]
    assert of_a_loop[0] == of_a_loop[1]
    assert of_a_loop[0][0] == "RehearsalFailed"
    assert "Read-only file system" in of_a_loop[0][1]


def rehearse_there(world: World, path: str) -> None:
    toy = build(world)
    checkpoint.rehearse(path, toy, optimizer_of(toy))
