"""What can stand where a file of a checkpoint was: other bytes, lengths, kinds of files, links and names."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.checkpoint.damage import all_files, flip_a_bit, zero_a_page

SPARSE_BYTES = 2**41


def bind(path: Path) -> None:
    """Leave a socket at a path."""
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.fchdir(here)
    os.close(here)


def _moved_out(file: Path) -> Path:
    """Move a file to a place outside of the checkpoint, with every byte."""
    outside = file.parents[3] / f"outside-{file.name}-{random.randrange(2**32)}"
    file.rename(outside)
    return outside


def _cut(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _grow(file: Path, chance: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(chance.randbytes(chance.randrange(1, 5000)))


def _replace(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replace(file: Path, _: random.Random) -> None:
        file.unlink()
        make(file)

    return replace


def _sparse(size: int | None) -> Callable[[Path, random.Random], None]:
    def replace(file: Path, _: random.Random) -> None:
        same = file.stat().st_size
        file.unlink()
        with file.open("wb") as opened:
            opened.truncate(same if size is None else size)

    return replace


def _link_out(file: Path, _: random.Random) -> None:
    file.symlink_to(_moved_out(file))


def _link_to_a_device(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _folder_linked_out(file: Path, _: random.Random) -> None:
    folder = file.parent
    folder.symlink_to(_moved_out(folder), target_is_directory=True)


def _folder_is_a_pipe(file: Path, _: random.Random) -> None:
    shutil.rmtree(file.parent)
    os.mkfifo(file.parent)


def _added_pipe(file: Path, chance: random.Random) -> None:
    os.mkfifo(file.with_name(f"added-{chance.randrange(1000)}"))


def _renamed(file: Path, _: random.Random) -> None:
    file.rename(file.with_name(file.name + ".bak"))


def _other_step(file: Path, _: random.Random) -> None:
    checkpoint = next(parent for parent in file.parents if parent.name.startswith("step-"))
    other = min(checkpoint.parent.glob("step-*"))
    there = other / file.relative_to(checkpoint)
    if there.read_bytes() == file.read_bytes():
        _cut(file, random.Random(1))
    else:
        shutil.copyfile(there, file)


MUTATIONS: dict[str, Callable[[Path, random.Random], object]] = {
    "a flipped bit": lambda file, chance: flip_a_bit([file], chance),
    "a zeroed page": lambda file, chance: zero_a_page([file], chance),
    "cut": _cut,
    "grown": _grow,
    "removed": _replace(lambda _: None),
    "emptied": _replace(Path.touch),
    "renamed": _renamed,
    "of another step": _other_step,
    "a pipe": _replace(os.mkfifo),
    "a socket": _replace(bind),
    "a directory": _replace(Path.mkdir),
    "a directory of a file": _replace(lambda file: (file / "deeper").mkdir(parents=True)),
    "a link out": _link_out,
    "a link to itself": _replace(lambda file: file.symlink_to(file)),
    "a link to nothing": _replace(lambda file: file.symlink_to("gone")),
    "a link to a device": _link_to_a_device,
    "sparse in its size": _sparse(None),
    "sparse and huge": _sparse(SPARSE_BYTES),
    "a pipe beside": _added_pipe,
    "its folder linked out": _folder_linked_out,
    "its folder a pipe": _folder_is_a_pipe,
}


def mutate(checkpoint: Path, number: int) -> str:
    """Change one file of a checkpoint; return what was done to which.

    Every kind comes equally often, and each seed draws a file of its own.
    """
    chance = random.Random(number)
    names = list(MUTATIONS)
    name = names[number % len(names)]
    files = all_files(checkpoint)
    if "folder" in name:  # the folder of the manifest is the checkpoint itself
        files = [file for file in files if file.parent != checkpoint]
    file = chance.choice(files)
    MUTATIONS[name](file, chance)
    return f"{number}: {file.relative_to(checkpoint)}: {name}"
