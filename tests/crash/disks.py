"""Small and read-only disks, for tests that run as root."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Remount = Callable[[str], None]
"""Takes options of mount(8)."""


def _mount(place: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Remount]]:
    """Return a disk of 4 MiB, and what gives it other options."""
    place = tmp_path / "disk"
    place.mkdir()
    if not _mount(place, "size=4m"):
        pytest.skip("needs root to mount a tmpfs")
    yield place, lambda options: subprocess.run(["mount", "-o", f"remount,{options}", place], check=True) and None
    subprocess.run(["umount", "-l", place], check=False)


def inodes_used(place: Path) -> int:
    """Return how many files and directories a disk has."""
    words = subprocess.run(["df", "--output=iused", place], capture_output=True, text=True, check=True).stdout.split()
    return int(words[-1])
