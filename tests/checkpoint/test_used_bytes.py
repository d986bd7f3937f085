"""What is loaded is what was verified, byte for byte: a file may change, or be read wrongly, between the two."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from holdfast.checkpoint.format.manifest import NAME, Manifest, parse
from holdfast.checkpoint.format.shards import layouts_of
from holdfast.checkpoint.format.verification import verified_manifest
from holdfast.checkpoint.keep.choose import newest_verified
from holdfast.checkpoint.loading import reader
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.optim.tagged_json import decode
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, save_after
from tests.checkpoint.damage import SHARDS, place_of
from tests.crash.faulty import FlippingFileStorage, FlippingStorage

STEP = "step-00000001"
SHARD = SHARDS[1]
TRAINED = "model.blocks.0.trained.weight"
TRAINER, RANK = "trainer.json", "rank/shard-1.json"


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("run") / STEP
    return path, pools(2).run(save_after, str(path), 1)[0]


@pytest.fixture
def step_1(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "run" / STEP))


def digit_of(checkpoint: Path, file: str) -> int:
    """Return where the digit of a number stands, or a byte of a trained matrix: neither makes a file unreadable."""
    if file != SHARD:
        data = (checkpoint / file).read_bytes()
        found = re.search(rb'"steps"\D*(\d)' if file == TRAINER else rb'"python": \[\d, \[(\d)', data)
        assert found is not None
        return found.start(1)
    path, start, _ = place_of(checkpoint, TRAINED, 1)
    assert path == checkpoint / SHARD
    return start + 5


def load(world: World, storage: LocalStorage, between: Callable[[], object]) -> dict[str, Any]:
    """Verify, let something happen, load; return what is there then, or the error and whether all stayed as it was."""
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    before, ranks = contents(toy, optimizer), RankGroup()
    manifest = verified_manifest(storage, STEP, ranks)
    ranks.gather(None)
    between()
    ranks.gather(None)
    try:
        loaded = reader.load_state(storage, STEP, toy, optimizer, ranks, manifest=manifest)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return {"error": (type(error).__name__, str(error)), "untouched": contents(toy, optimizer) == before}
    return contents(toy, optimizer) | {"extra": decode(loaded.shared["extra"])}


def flip_between(world: World, checkpoint: Path, file: str, place: int) -> dict[str, Any]:
    """Flip a bit of a file between the verification and the load."""

    def flip() -> None:
        if world.is_first:
            data = bytearray((checkpoint / file).read_bytes())
            data[place] ^= 1
            (checkpoint / file).write_bytes(data)

    return load(world, LocalStorage(checkpoint.parent), flip)


@pytest.mark.parametrize(("file", "ranks"), [(TRAINER, 2), (TRAINER, 3), (RANK, 2), (SHARD, 1), (SHARD, 2), (SHARD, 3)])
def test_a_byte_that_flips_after_the_verification_is_refused_by_name(
    pools: Any, step_1: Path, file: str, ranks: int
) -> None:
    found = pools(ranks).run(flip_between, step_1, file, digit_of(step_1, file))

    assert all(each == found[0] for each in found)
    assert found[0]["untouched"]
    name, said = found[0]["error"]
    assert name in {"CheckpointCorrupt", "TensorsDiffer"}
    assert "blocks.0.trained.weight" in said if file == SHARD else f"{file} is damaged" in said


def read_wrongly(world: World, checkpoint: Path, file: str, place: int | None, failures: int) -> dict[str, Any]:
    """Load through a storage whose first reads after the verification are wrong, or fail."""
    storage: Any
    if file == SHARD:
        storage = FlippingFileStorage(checkpoint.parent, file, 0, place)
    else:
        storage = FlippingStorage(checkpoint.parent, file, 0, same=True, place=place or 0)
    return load(world, storage, lambda: setattr(storage, "failures", failures))


@pytest.mark.parametrize(("file", "ranks"), [(TRAINER, 2), (RANK, 2), (SHARD, 2), (SHARD, 3)])
def test_one_wrong_read_is_read_again(pools: Any, saved: tuple[Path, dict[str, Any]], file: str, ranks: int) -> None:
    found = pools(ranks).run(read_wrongly, saved[0], file, digit_of(saved[0], file), 1)

    assert all(each == saved[1] | {"extra": {"steps": 1}} for each in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_read_that_fails_for_a_while_is_tried_again(
    pools: Any, saved: tuple[Path, dict[str, Any]], ranks: int
) -> None:
    found = pools(ranks).run(read_wrongly, saved[0], SHARD, None, 2)

    assert all(each == saved[1] | {"extra": {"steps": 1}} for each in found)


@pytest.mark.parametrize(("file", "ranks"), [(TRAINER, 2), (SHARD, 3)])
def test_what_is_read_otherwise_each_time_is_no_damage(
    pools: Any, saved: tuple[Path, dict[str, Any]], file: str, ranks: int
) -> None:
    """The disk itself has the right bytes, and every read of them is wrong."""
    place = None if file == SHARD else digit_of(saved[0], file)

    found = pools(ranks).run(read_wrongly, saved[0], file, place, 1000)

    assert all(each == found[0] for each in found)
    assert found[0]["error"][0] == "CheckpointUnreadable"
    assert ("cannot be read: Input/output error" if file == SHARD else "has other bytes each time") in found[0][
        "error"
    ][1]


class CountedFile:
    """A file that counts the bytes that are read."""

    def __init__(self, file: IO[bytes], count: Callable[[int], object]) -> None:
        self._file, self._count = file, count

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._count(len(data))
        return data

    def readinto(self, buffer: memoryview) -> int:
        size: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._count(size)
        return size


class CountingStorage(LocalStorage):
    """A directory that counts the bytes that are read, by file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts: Counter[str] = Counter()

    def _count(self, path: str, size: int) -> None:
        self.counts[path.partition("/")[2]] += size

    def open(self, path: str) -> Any:
        return CountedFile(super().open(path), partial(self._count, path))

    def read(self, path: str) -> bytes:
        data = super().read(path)
        self._count(path, len(data))
        return data

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        self._count(path, self.size(path))
        return super().hash(path, from_disk=from_disk)


def resume(world: World, checkpoint: Path) -> Counter[str]:
    """Resume from the newest checkpoint as a run does; return the bytes that were read, by file."""
    toy = build(world, seed=1)
    optimizer, storage, ranks = optimizer_of(toy), CountingStorage(checkpoint.parent), RankGroup()

    def use(name: str, manifest: Manifest) -> None:
        reader.load_state(storage, name, toy, optimizer, ranks, manifest=manifest)

    choice = newest_verified(storage, ranks, use=use)

    assert choice is not None
    return storage.counts


def test_a_resume_at_the_same_number_of_ranks_reads_its_bytes_once(
    pools: Any, saved: tuple[Path, dict[str, Any]]
) -> None:
    counts = sum(pools(2).run(resume, saved[0]), Counter[str]())

    layouts = layouts_of(parse((saved[0] / NAME).read_bytes(), NAME))
    first, second = (layouts[file] for file in SHARDS[:2])
    copies = [stored.piece for stored in second.chunks if stored.piece.sizes == stored.piece.shape]
    assert counts[SHARDS[0]] == first.size
    # What is whole on both ranks is in one of the files, of which the other rank reads the header too.
    assert counts[SHARDS[1]] == second.size + len(second.header) + sum(piece.bytes_ for piece in copies)
    assert copies
