"""Each rank writes one file: copies of a chunk once, bytes in balance, and never more than two tensors in memory."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.manifest import About, Manifest
from holdfast.checkpoint.format.shards import Piece, layouts_of, pieces_by_rank, shard_file
from holdfast.checkpoint.format.snapshot import MODEL, Snapshot
from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import commit
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import refused_save

COUNT = 6
SHAPE = (50, 7)


class Source:
    """Tensors that are made when they are asked for, and all memory that they have at that time."""

    def __init__(self, broken: int | None = None) -> None:
        self.made: list[weakref.ref[Any]] = []
        self.bytes_at_once: list[int] = []
        self._broken = broken

    def read(self, number: int) -> Tensor:
        if number == self._broken:
            raise OSError(5, "Input/output error")
        array = np.full(SHAPE, number, np.float32)
        self.made.append(weakref.ref(array))  # memory that a tensor shares lives as long as any view of it
        self.bytes_at_once.append(sum(alive.nbytes for made in self.made if (alive := made()) is not None))
        return torch.from_numpy(array)


def saved(source: Source, folder: Path) -> Manifest:
    names = [f"{MODEL}layer.{number}.weight" for number in range(COUNT)]
    snapshot = Snapshot(
        tensors={name: torch.empty(SHAPE, device="meta") for name in names},
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


def test_a_tensor_that_reads_as_another_than_was_planned_ends_the_save(tmp_path: Path) -> None:
    source = Source()
    source.read = lambda number: torch.zeros(SHAPE, dtype=torch.int32)  # type: ignore[method-assign]

    with pytest.raises(SaveFailed, match=r"layer\.0\.weight reads as \[50, 7\] torch\.int32"):
        saved(source, tmp_path)

    assert list(tmp_path.iterdir()) == []


NUMBERS = (7, 5, 4, 4, 3, 1)
"""Elements of the tensors that every rank has."""


class Copies(nn.Module):
    """Tensors that every rank has whole, of which one may differ by rank."""

    def __init__(self, rank: int, differing: int | None = None) -> None:
        super().__init__()
        for number, size in enumerate(NUMBERS):
            value = rank if number == differing else 0
            self.register_buffer(f"whole_{number}", torch.arange(size) + value)


def save_copies(world: World, path: str, differing: int | None = None) -> None:
    checkpoint.save(path, Copies(world.rank, differing), timeout_minutes=1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_several_ranks_have_is_written_once_and_in_balance(pools: Any, tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "step-00000001"

    pools(ranks).run(save_copies, str(path))

    manifest = checkpoint.verify(str(path))
    files = sorted(file.name for file in (path / "tensors").iterdir())
    assert files == [Path(shard_file(rank)).name for rank in range(ranks)]
    layouts = layouts_of(manifest)
    written = [stored.piece.key for layout in layouts.values() for stored in layout.chunks]
    assert sorted(written) == sorted(manifest.tensors)  # each in one file
    sizes = [sum(stored.piece.bytes_ for stored in layout.chunks) for layout in layouts.values()]
    assert sum(sizes) == 8 * sum(NUMBERS)
    assert max(sizes) - min(sizes) <= 8 * max(NUMBERS)
    for number, size in enumerate(NUMBERS):
        (chunk,) = manifest.tensors[f"{MODEL}whole_{number}"].chunks
        assert chunk.hash == hash_tensor(torch.arange(size))


@pytest.mark.parametrize("differing", [0, len(NUMBERS) - 1])
def test_copies_that_differ_are_refused_by_name_on_all_ranks(pools: Any, tmp_path: Path, differing: int) -> None:
    said = refused_save(pools, tmp_path, save_copies, differing)

    assert f"{MODEL}whole_{differing} is replicated, and rank 1 holds other numbers" in said


def piece(key: str, rows: int, offset: int = 0) -> Piece:
    return Piece(key, (64, 4), torch.float32, (offset, 0), (rows, 4))


def test_each_piece_has_one_writer_that_has_it_and_ranks_write_about_the_same() -> None:
    """Four ranks as 2 x 2: pairs have the same shards, and all have the same whole tensors; one has a large shard."""
    halves = [
        {f"half.{number}": piece(f"half.{number}", 32, 32 * (rank % 2)) for number in range(5)} for rank in range(4)
    ]
    whole = {f"whole.{number}": piece(f"whole.{number}", 2) for number in range(9)}
    own = [{"own": piece("own", 6)}, {}, {}, {}]
    held = [{**of_pair, **whole, **of_rank} for of_pair, of_rank in zip(halves, own, strict=True)]

    written = pieces_by_rank(held)

    everything = [each for pieces in written for each in pieces]
    assert len(everything) == len(set(everything)) == 2 * 5 + 9 + 1
    assert set(everything) == {each for pieces in held for each in pieces.values()}
    for rank, pieces in enumerate(written):
        assert set(pieces) <= set(held[rank].values())
        assert len({each.key for each in pieces}) == len(pieces)
    sizes = [sum(each.bytes_ for each in pieces) for pieces in written]
    assert max(sizes) - min(sizes) <= piece("half", 32).bytes_  # no more than one of the largest pieces


def test_seven_equal_copies_on_three_ranks_are_written_by_all_of_them() -> None:
    held = [{f"{number}": piece(f"{number}", 3) for number in range(7)}] * 3

    assert [len(pieces) for pieces in pieces_by_rank(held)] == [3, 2, 2]
