"""A save of tensors that lie in other files reads each when it is its turn, and has two of them in memory at most."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.snapshot import MODEL, Snapshot
from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import commit
from holdfast.parallel.collectives import RankGroup

COUNT = 6
SHAPE = (50, 7)


class Source:
    """Tensors that are made when they are asked for, and all memory that they have at that time."""

    def __init__(self, broken: int | None = None) -> None:
        self.made: list[Tensor] = []
        self.bytes_at_once: list[int] = []
        self._broken = broken

    def read(self, number: int) -> Tensor:
        if number == self._broken:
            raise OSError(5, "Input/output error")
        self.made.append(torch.full(SHAPE, float(number)))
        self.bytes_at_once.append(sum(each.untyped_storage().nbytes() for each in self.made))
        return self.made[-1]


def saved(source: Source, folder: Path) -> Manifest:
    names = [f"{MODEL}layer.{number}.weight" for number in range(COUNT)]
    snapshot = Snapshot(
        tensors={name: torch.zeros(()).expand(SHAPE) for name in names},
        trained=frozenset(names),
        ties={},
        optimizer=None,
        rank_state={},
        shared={},
        readers={name: partial(source.read, number) for number, name in enumerate(names)},
    )
    return commit(snapshot, LocalStorage(folder), About(run_id="", step=1), RankGroup())


def test_a_save_of_what_lies_elsewhere_has_two_tensors_in_memory_and_is_whole(tmp_path: Path) -> None:
    source = Source()

    manifest = saved(source, tmp_path)

    assert len(source.made) == COUNT
    assert max(source.bytes_at_once) <= 2 * 4 * 50 * 7
    verify_checkpoint(LocalStorage(tmp_path), "step-00000001")
    stored = StoredCheckpoint(LocalStorage(tmp_path), "step-00000001", manifest)
    for number in range(COUNT):
        assert torch.equal(stored.read(f"{MODEL}layer.{number}.weight"), torch.full(SHAPE, float(number)))


def test_a_tensor_that_cannot_be_read_ends_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="Input/output error"):
        saved(Source(broken=3), tmp_path)

    assert list(tmp_path.iterdir()) == []
