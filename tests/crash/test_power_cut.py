"""The power goes when a save has returned: what the disk holds at that moment is a whole checkpoint.

A file system in a file is mounted; its image is copied while it is mounted, without a sync. The copy holds what had
reached the disk and nothing else, as after a power cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.choose import newest_verified
from holdfast.checkpoint.storage import LocalStorage
from holdfast.parallel.collectives import ProcessExchange
from tests.checkpoint.cases import save_after


def mount(*words: object) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return an image and where it is mounted; data that nobody syncs stays in memory for ten minutes."""
    image, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = shutil.which("mkfs.ext4") is not None and os.geteuid() == 0
    made = made and subprocess.run(["mkfs.ext4", "-q", image], capture_output=True, check=False).returncode == 0
    if not made or not mount("-o", "loop,commit=600,noauto_da_alloc", image, place):
        pytest.skip("needs root, mkfs.ext4 and a loop device")
    yield image, place
    unmount(place)


@pytest.mark.parametrize("ranks", [pytest.param(2, id="06-power loss after a save returned")])
def test_power_loss_after_a_save_returned_keeps_the_checkpoint(
    pools: Any, tmp_path: Path, disk: tuple[Path, Path], ranks: int
) -> None:
    image, place = disk
    directory = place / "run" / "checkpoints"
    directory.mkdir(parents=True)
    os.sync()
    pools(ranks).run(save_after, str(directory / "step-00000001"), 1)
    (place / "unsynced").write_bytes(b"x" * 100_000)

    after, remains = tmp_path / "after", tmp_path / "remains"
    shutil.copyfile(image, after)
    remains.mkdir()
    assert mount("-o", "loop", after, remains)
    try:
        unsynced = remains / "unsynced"
        lost = not unsynced.exists() or unsynced.read_bytes() != b"x" * 100_000
        storage = LocalStorage(remains / "run" / "checkpoints")
        choice = newest_verified(storage, ProcessExchange())
    finally:
        unmount(remains)

    assert lost, "the power cut lost nothing, so the test shows nothing"
    assert choice is not None
    assert choice.manifest.step == 1
