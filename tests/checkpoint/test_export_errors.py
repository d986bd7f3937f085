"""An error of one rank during an export is raised on all ranks, and none of them waits for another's tensors."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.export.adapters import Description, export_adapters
from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import EXPORT_PHASES, Weights, export, model_weights, write_export
from holdfast.models.files.conversion import Header, renamed
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.parallel.stream import Holding, headers_of, held_tensors
from tests.models.cases import build
from tests.models.directories import tensors_in, write_directory

LORA = {"rank": 4, "alpha": 8.0}


def export_unreadable(
    world: World, source: str, place: str, victim: int, number: int, error: Exception, lora: Any = None
) -> None:
    policy, origin = build(world, {"path": source, "lora": lora})
    holdings = held_tensors(policy)

    def read(name: str) -> Holding:
        if world.rank == victim and name == sorted(holdings)[number]:
            raise error
        return holdings[name]

    weights = model_weights(read, headers_of(holdings, None), origin)
    write_export(weights, Papers(), Path(place), RankGroup(), origin)


def export_with_an_error(world: World, source: str, place: str, phase: str, error: Exception) -> None:
    policy, origin = build(world, {"path": source})

    def reached(name: str) -> None:
        if name == phase:
            raise error

    export(policy, origin, Path(place), RankGroup(), reached=reached)


def export_adapters_unless(world: World, source: str, place: str, phase: str, error: Exception) -> None:
    policy, _ = build(world, {"path": source, "lora": LORA})

    def reached(name: str) -> None:
        if name == phase:
            raise error

    export_adapters(policy, Description("{}", None), Path(place), RankGroup(), Papers(), reached=reached)


def export_whole(world: World, source: str, place: str) -> None:
    policy, origin = build(world, {"path": source})
    export(policy, origin, Path(place), RankGroup())


def assert_one_error(errors: list[tuple[str, str]], name: str, *words: str) -> None:
    assert len(set(errors)) == 1
    assert errors[0][0] == name
    for word in words:
        assert word in errors[0][1]


@pytest.mark.cases("all")
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 7, -1], ids=["first tensor", "in the middle", "last tensor"])
def test_a_tensor_that_one_rank_cannot_read_ends_an_export_on_all(
    pools: Any, tmp_path: Path, victim: int, number: int
) -> None:
    source, place = tmp_path / "in", tmp_path / "out"
    write_directory(source, "llama")
    error = MemoryError("no room for a shard")

    errors = pools(3).errors(
        export_unreadable, str(source), str(place / "model"), victim, number, error, timeout_seconds=60
    )

    where = f"on rank {victim}, " if victim else ""
    assert_one_error(errors, "ExportFailed", f"{place / 'model'} could not be written: {where}MemoryError: no room for")
    assert not place.exists() or list(place.iterdir()) == []
    pools(3).run(export_whole, str(source), str(place / "model"), timeout_seconds=60)
    written, expected = tensors_in(place / "model"), tensors_in(source)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CheckpointCorrupt("weights are damaged")])
@pytest.mark.parametrize(
    ("kind", "lora"), [("mixtral", None), ("llama", LORA)], ids=["experts that are split", "merged adapters"]
)
def test_an_error_while_several_tensors_are_joined_ends_an_export_on_all(
    pools: Any, tmp_path: Path, kind: str, lora: Any, error: Exception
) -> None:
    write_directory(tmp_path / "in", kind)

    errors = pools(2).errors(
        export_unreadable, str(tmp_path / "in"), str(tmp_path / "out"), 1, 4, error, lora, timeout_seconds=60
    )

    assert_one_error(errors, "ExportFailed" if isinstance(error, OSError) else "CheckpointCorrupt", str(error))
    assert not (tmp_path / "out").exists()


@pytest.mark.cases("all")
@pytest.mark.parametrize("phase", EXPORT_PHASES[:-1])
@pytest.mark.parametrize("error", [MemoryError("no room"), SafetensorError("too long"), ValueError("a value")])
def test_any_error_of_the_rank_that_writes_ends_an_export_on_all(
    pools: Any, tmp_path: Path, phase: str, error: Exception
) -> None:
    write_directory(tmp_path / "in", "llama")

    for act in (export_with_an_error, export_adapters_unless):
        errors = pools(2).errors(
            act, str(tmp_path / "in"), str(tmp_path / "out/model"), phase, error, timeout_seconds=60
        )

        assert_one_error(errors, "ExportFailed", f"{type(error).__name__}: {error}")
        assert list((tmp_path / "out").iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_on_all_ranks_before_a_tensor_is_sent(
    pools: Any, tmp_path: Path
) -> None:
    write_directory(tmp_path / "in", "llama")
    (tmp_path / "file").write_text("")

    errors = pools(2).errors(export_whole, str(tmp_path / "in"), str(tmp_path / "file/model"), timeout_seconds=60)

    assert_one_error(errors, "ExportFailed", "File exists", str(tmp_path / "file"))


def export_without_room(world: World, place: str) -> None:
    """Export two tensors of 256 MiB of which rank 0 can take its own half alone."""
    mesh = init_device_mesh("cpu", (world.size,))
    tensor = DTensor.from_local(torch.zeros(2**25), mesh, [Shard(0)])
    plan = renamed({"first": "a", "second": "b"}, dict.fromkeys(("first", "second"), Header((2**26,), torch.float32)))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def reached(name: str) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**25, hard))

    weights = Weights(lambda _: tensor, plan, {"model.safetensors": ["first", "second"]})
    try:
        write_export(weights, Papers(), Path(place), RankGroup(), None, reached)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_writer_without_room_for_a_shard_does_not_leave_its_sender_waiting(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(export_without_room, str(tmp_path / "out"), timeout_seconds=60)

    assert_one_error(errors, "ExportFailed", "allocate memory")
    assert list(tmp_path.iterdir()) == []
