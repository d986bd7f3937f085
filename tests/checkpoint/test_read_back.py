"""After a save every file is read again, and older checkpoints are deleted only if it is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.place.layout import QUARANTINE
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import _bytes_to_write
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build
from tests.crash.cases import session_of
from tests.distributed.toys import Toy, shard


def save_three_and_damage_the_last(world: World, directory: Path) -> str:
    """Save thrice, keeping two; a bit of the third flips between its commit and the look at it."""
    toy = build(world)

    def damage(phase: str) -> None:
        path = directory / "step-00000003" / shard_file(0)
        if phase == "read back" and world.is_first and path.exists():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))

    session = session_of(LocalStorage(directory), world, reached=damage)
    for number in (1, 2, 3):
        session.save(take(toy, None), number)
        try:
            session.collect()
        except SaveFailed as error:
            return f"step {number}: {error}"
    return "nothing was noticed"


def test_a_bit_that_flips_after_the_commit_costs_no_older_checkpoint(pools: Any, tmp_path: Path) -> None:
    one, two = pools(2).run(save_three_and_damage_the_last, tmp_path)

    assert one == two
    assert one.startswith("step 3: step 3 was written and reads back differently: ")
    storage = LocalStorage(tmp_path)
    assert list(steps(storage)) == [1, 2]
    assert [name for name in storage.names() if name.startswith(QUARANTINE)]


class ForgetfulStorage(LocalStorage):
    """A disk that kept another bit than it was given, under a cache that remembers what was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._written: dict[str, str] = {}

    def damage(self, path: str) -> None:
        self._written[path] = super().hash(path)
        data = bytearray(self.path(path).read_bytes())
        data[len(data) // 2] ^= 1
        self.path(path).write_bytes(bytes(data))

    def hash(self, path: str, *, from_disk: bool = False) -> str:
        return super().hash(path, from_disk=from_disk) if from_disk else self._written.get(path) or super().hash(path)


def save_to_a_bad_disk(world: World, directory: Path) -> str:
    """Save once; the disk has another bit than the cache when the files are read again."""
    toy = build(world)
    storage = ForgetfulStorage(directory)

    def damage(phase: str) -> None:
        if phase == "read back":
            storage.damage(f"step-00000001/{shard_file(0)}")

    session = session_of(storage, world, reached=damage)
    session.save(take(toy, None), 1)
    try:
        session.collect()
    except SaveFailed as error:
        return str(error)
    return "nothing was noticed"


def test_files_are_read_back_from_the_disk_and_not_from_the_cache(pools: Any, tmp_path: Path) -> None:
    (said,) = pools(1).run(save_to_a_bad_disk, tmp_path)

    assert said.startswith("step 1 was written and reads back differently: ")


def bytes_counted(world: World, replicate: int) -> tuple[int, int]:
    """Return what all ranks together say they will write, and what the model has."""
    toy = Toy(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
    if replicate:
        shard(world, toy, replicate=replicate, shard=world.size // replicate)
    snapshot = take(toy, None)
    ranks = RankGroup()
    counted = sum(ranks.gather(_bytes_to_write(snapshot, first=world.is_first)))
    return counted, sum(_bytes(tensor) for tensor in snapshot.tensors.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("replicate", [0, 1, 2, 4])
def test_what_ranks_hold_alike_needs_room_once(pools: Any, replicate: int) -> None:
    for counted, has in pools(4).run(bytes_counted, replicate):
        assert counted == has > 0
