"""What the tests of other systems' checkpoints share: fixtures out of their archive, and what they must be equal to."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ARCHIVE = HERE / "fixtures.tar.xz"


def read_archive() -> dict[str, bytes]:
    """Return every file of the archive by its name."""
    with tarfile.open(ARCHIVE) as archive:
        files = [(entry.name.removeprefix("./"), archive.extractfile(entry)) for entry in archive if entry.isfile()]
        return {name: file.read() for name, file in files if file is not None}


def place_of(fixture: Path) -> Path:
    """Return where a user would point: a run, a step, or a checkpoint."""
    names = ("checkpoint", "checkpoint-2", "checkpoint.ckpt")
    return next(path for name in names if (path := fixture / name).exists())


def truth_of(fixture: Path) -> dict[str, Any]:
    truth: dict[str, Any] = torch.load(fixture / "truth.pt", weights_only=True)
    return truth


def hash_of(folder: Path) -> str:
    """Return a hash of every name, kind and byte below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_symlink():
            digest.update(str(path.readlink()).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
