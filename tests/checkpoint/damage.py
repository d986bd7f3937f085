"""Ways to damage a checkpoint, and ways to hide it: the manifest made to fit what is there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.manifest import _HASH_KEY, NAME, FileEntry, Manifest, _canonical, parse
from holdfast.checkpoint.format.shards import layouts_of, shard_file
from holdfast.checkpoint.place.hashing import hash_bytes, hash_file

PAGE = 4096
SHARDS = tuple(map(shard_file, range(3)))
"""Files of the tensors that the first ranks wrote, relative to a checkpoint."""


def all_files(checkpoint: Path) -> list[Path]:
    """Return every file of a checkpoint, the manifest included."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip_a_bit(files: list[Path], chance: random.Random) -> tuple[Path, bytes]:
    """Flip one bit, drawn uniformly over files, then bytes; return the file and its bytes before."""
    file = chance.choice(files)
    before = file.read_bytes()
    damaged = bytearray(before)
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    file.write_bytes(damaged)
    return file, before


def zero_a_page(files: list[Path], chance: random.Random) -> tuple[Path, bytes]:
    """Zero one aligned page, drawn uniformly over files, then pages; return the file and its bytes before."""
    while True:
        file = chance.choice(files)
        before = file.read_bytes()
        start = chance.randrange((len(before) + PAGE - 1) // PAGE) * PAGE
        page = before[start : start + PAGE]
        if any(page):
            file.write_bytes(before[:start] + bytes(len(page)) + before[start + PAGE :])
            return file, before


def rewrite_manifest(checkpoint: Path, change: Callable[[Manifest], Manifest] = lambda manifest: manifest) -> None:
    """Make the manifest fit the files that are there, as somebody who hides something would."""
    manifest = parse((checkpoint / NAME).read_bytes(), NAME)
    files = {
        str(file.relative_to(checkpoint)): FileEntry(file.stat().st_size, hash_file(file))
        for file in all_files(checkpoint)
        if file.name != NAME
    }
    (checkpoint / NAME).write_bytes(change(replace(manifest, files=files)).to_json())


def place_of(checkpoint: Path, key: str, number: int = 0) -> tuple[Path, int, int]:
    """Return the file that holds a chunk of a tensor, and the chunk's offset and size there, in bytes."""
    manifest = parse((checkpoint / NAME).read_bytes(), NAME)
    file = manifest.tensors[key].chunks[number].file
    stored = next(stored for stored in layouts_of(manifest)[file].chunks if stored.piece.key == key)
    return checkpoint / file, stored.start, stored.piece.bytes_


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as JSON, whatever it is then, and make its own hash fit."""
    outer = json.loads((checkpoint / NAME).read_bytes())
    change(outer["manifest"])
    sealed = {**outer, _HASH_KEY: hash_bytes(_canonical(outer["manifest"]))}
    (checkpoint / NAME).write_bytes(_canonical(sealed))


class Touch:
    """Unpickles by creating a file, as a hostile pickle does worse things."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))
